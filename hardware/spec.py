"""The description of a device: memory, matmul dtypes, dense peaks, bandwidth.

Nothing is guessed: a figure that no vendor publishes and nobody measured is None.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

# A process's CUDA context takes this much of a card before any tensor: the least and the most that was reported.
CUDA_CONTEXT_BYTES = (504 * 2**20, 942 * 2**20)


@dataclass(frozen=True)
class DeviceSpec:
    name: str
    kind: str  # cpu | cuda (AMD too, as in torch) | mps | tpu
    memory_bytes: int | None = None  # what may be used
    total_bytes: int | None = field(default=None, kw_only=True)  # of its memory, as CUDA reports it
    peak_flops: Mapping[str, float] = field(default_factory=dict, hash=False)  # matmul dtype -> dense FLOP/s
    bandwidth: float | None = None  # of its memory, bytes/s
    source: str = "unknown"  # of the peaks
    dtypes: tuple[str, ...] = ("float32",)  # matmuls it has in hardware, whether or not their peak is known
    link: float | None = None  # from the host's memory to its own, bytes/s
    cross_core_s_per_byte: float = 0.0  # what one core takes longer to read what another one wrote
    # operations timed on it: what -> shapes -> (FLOPs, bytes, seconds), by the key of an operation (estimate/tape.py)
    op_times: Mapping[str, Mapping[str, list]] = field(default_factory=dict, hash=False, repr=False)
    measured_with: str = ""  # the torch version and thread count that the measured figures belong to; "": unknown

    @classmethod
    def from_dict(cls, entry: dict):
        """Return the spec that dataclasses.asdict wrote, in this version or an earlier one."""
        earlier_names = {"crossing": "cross_core_s_per_byte"}
        entry = {earlier_names.get(name, name): value for name, value in entry.items()}
        return cls(**entry | {"dtypes": tuple(entry["dtypes"])})

    def has_matmul(self, dtype):
        """Return whether the hardware multiplies matrices of this dtype; a measured peak alone does not say so."""
        return dtype == "float32" or dtype in self.dtypes

    @property
    def native_dtype(self):
        """The dtype of matmuls that dtype="auto" becomes: 16 bits where the hardware has them."""
        return "bfloat16" if self.has_matmul("bfloat16") else "float16" if self.kind == "cuda" else "float32"

    @property
    def leaves_context(self):
        """Whether memory_bytes is the total less a CUDA context, as of a card in the table that nobody runs on yet."""
        return self.total_bytes is not None and self.memory_bytes == self.total_bytes - CUDA_CONTEXT_BYTES[0]

    def peak(self, dtype):
        """Return the dense peak of matmuls in dtype, FLOP/s; None where it is unknown."""
        return self.peak_flops.get(dtype)
