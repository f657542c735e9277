"""A stand-in for nanoGPT's train.py: a script with a function get_batch, which reads global variables."""

raise SystemExit("This is a script. It must not be executed to get its function.")


def get_batch(split):
    tokens = np.fromfile(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16).astype(np.int64)
    rows = torch.from_numpy(tokens).unfold(0, block_size + 1, 1)[torch.randint(len(tokens) - block_size, (batch_size,))]
    return rows[:, :-1].to(device), rows[:, 1:].to(device)
