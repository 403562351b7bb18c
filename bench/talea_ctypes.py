"""What: the C interface of libtalea.so for torch tensors, by ctypes alone.
Why: the peers' bench calls Talea in the same process and on the same stream as every peer.
Never: copies a tensor or synchronises."""

import ctypes as c

DTYPES = {"torch.float32": 0, "torch.bfloat16": 1, "torch.float16": 2, "torch.int64": 5}
TENSORS_IN = (
    "hidden weight bias targets class_weight token_weight token_scale soft_target_ids "
    "soft_target_probs upstream upstream_lse upstream_entropy"
).split()
TENSORS_OUT = (
    "loss lse target_logprob entropy argmax accuracy topk_values topk_ids topk_logprobs dx dw db"
).split()


class Tensor(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("dtype", c.c_int32),
        ("rank", c.c_int32),
        ("shape", c.c_int64 * 4),
        ("stride", c.c_int64 * 4),
        ("device", c.c_int32),
        ("device_index", c.c_int32),
        ("present", c.c_int32),
        ("reserved", c.c_int32),
    ]


class Inputs(c.Structure):
    _fields_ = [("struct_bytes", c.c_int64)] + [(name, Tensor) for name in TENSORS_IN]


class Outputs(c.Structure):
    _fields_ = (
        [("struct_bytes", c.c_int64)]
        + [(name, Tensor) for name in TENSORS_OUT]
        + [("accumulate_dw", c.c_int32), ("accumulate_db", c.c_int32)]
    )


class Options(c.Structure):
    _fields_ = [
        ("struct_bytes", c.c_int64),
        ("reduction", c.c_int32),
        ("denominator", c.c_int32),
        ("denominator_value", c.c_double),
        ("denominator_scope", c.c_int32),
        ("on_empty", c.c_int32),
        ("target_check", c.c_int32),
        ("threads", c.c_int32),
        ("ignore_index", c.c_int64),
        ("vocab", c.c_int64),
        ("label_smoothing", c.c_double),
        ("z_loss", c.c_double),
        ("softcap", c.c_double),
        ("logit_scale", c.c_double),
        ("workspace_limit_bytes", c.c_int64),
        ("lane", c.c_char_p),
    ]


class Args(c.Structure):
    _fields_ = [
        ("struct_bytes", c.c_int64),
        ("abi_version", c.c_int32),
        ("reserved", c.c_int32),
        ("inputs", c.POINTER(Inputs)),
        ("outputs", c.POINTER(Outputs)),
        ("options", c.POINTER(Options)),
        ("ranks", c.c_void_p),
        ("workspace", c.c_void_p),
        ("workspace_bytes", c.c_int64),
        ("stream", c.c_void_p),
    ]


def view(t):
    if t is None:
        return Tensor()
    v = Tensor(data=t.data_ptr(), dtype=DTYPES[str(t.dtype)], rank=t.dim(), present=1)
    v.device = 1 if t.is_cuda else 0
    v.device_index = t.device.index or 0
    for i in range(t.dim()):
        v.shape[i], v.stride[i] = t.shape[i], t.stride(i)
    return v


class Library:
    def __init__(self, path):
        self.lib = c.CDLL(path)
        self.lib.talea_last_error.restype = c.c_char_p
        self.abi = self.lib.talea_abi_version()

    def check(self, status):
        if status:
            raise RuntimeError(self.lib.talea_last_error().decode())

    def prepare(self, tensors_in, tensors_out, lane, limit_bytes, accumulate_dw, stream):
        """Args ready for run(); the caller adds the workspace of `workspace_bytes`."""
        i, o, p, a = Inputs(), Outputs(), Options(), Args()
        i.struct_bytes, o.struct_bytes, a.struct_bytes = c.sizeof(i), c.sizeof(o), c.sizeof(a)
        for name, t in tensors_in.items():
            setattr(i, name, view(t))
        for name, t in tensors_out.items():
            setattr(o, name, view(t))
        o.accumulate_dw = int(accumulate_dw)
        self.check(
            self.lib.talea_linear_cross_entropy_options_init(c.byref(p), c.c_int64(c.sizeof(p)))
        )
        p.lane, p.workspace_limit_bytes = lane.encode(), limit_bytes
        a.abi_version, a.stream = self.abi, stream
        a.inputs, a.outputs, a.options = c.pointer(i), c.pointer(o), c.pointer(p)
        need = c.c_int64()
        self.check(self.lib.talea_workspace_bytes(c.byref(a), c.byref(need)))
        a.workspace_bytes = need.value
        return a

    def run(self, args):
        self.check(self.lib.talea_linear_cross_entropy(c.byref(args), None))
