"""Counts: the parameters, and the FLOPs of a step in the three usual conventions."""


def parameters(s):
    """Return how many parameters there are, and how many of them are in matmuls.

    The matrices are in matmuls, except tables that are only looked up. A tied embedding is looked up, but it is also
    the head, which is a matmul.
    """
    only_looked_up = {"wpe"} if s.config.tie_weights else {"wte", "wpe"}
    in_matmuls = [p for name, p in s.params.items() if len(p.shape) == 2 and name not in only_looked_up]
    params, params_matmul = (sum(p.numel * p.repeat for p in chosen) for chosen in (s.params.values(), in_matmuls))
    return {"params": params, "params_matmul": params_matmul}


def step_flops(s):
    """Return the FLOPs of a step in three conventions, and the FLOPs that the hardware executes.

    per_step: all matmuls, with attention over all T^2 pairs of positions, as PaLM counts it
    causal_per_step: the same, with attention over the T (T + 1) / 2 pairs that the causal mask leaves
    six_nd_per_token: for each parameter, 2 FLOPs in forward and 4 in backward; attention is left out
    hardware_per_step: per_step and what backward recomputes, which no other figure includes
    """
    T, tokens = s.config.block_size, s.config.tokens_per_step

    def total(is_counted):
        return sum(op.flops * op.times for op in s.ops if is_counted(op))

    per_step = total(lambda op: not op.recomputed)
    attention = total(lambda op: op.is_attention and not op.recomputed)
    six_nd = 6 * parameters(s)["params"]
    return {
        "tokens_per_step": tokens,
        "six_nd_per_token": six_nd,
        "six_nd_per_step": six_nd * tokens,
        "forward_per_token": total(lambda op: op.phase == "forward") // tokens,
        "per_token": per_step // tokens,
        "per_step": per_step,
        "causal_per_step": per_step - attention + attention * (T + 1) // (2 * T),
        "hardware_per_step": total(lambda op: True),
    }
