"""The operators and modules that an artifact may name. Nothing else of torch or Python is reached by a file."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dubito.models.network.normalisation import ScaleShift
from dubito.models.network.window_attention import WindowAttention, WindowAttentionV2

LARGEST_NUMBER = 1 << 62  # of numbers that are no tensors: sizes and what is computed from them
MOST_PIECES = 4096  # tensors that a call may give


def words(text: str) -> list[str]:
    return text.split()


ARITHMETIC = words(
    "add sub mul truediv floordiv mod pow matmul neg abs eq ne lt le gt ge and_ or_ xor invert not_ "
    "iadd isub imul itruediv ifloordiv ipow iand ior"
)
TORCH = words(
    "abs add addcdiv addcmul addmm all amax amin any arange argmax argmin argsort as_tensor atan atan2 baddbmm bmm "
    "broadcast_to broadcast_tensors cat ceil celu channel_shuffle chunk clamp clamp_max clamp_min clip clone concat "
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d cos cosh cross cummax cummin cumprod cumsum diag "
    "diagonal diff div divide dot einsum empty_like eq erf exp exp2 expm1 eye flatten flip floor floor_divide fmod "
    "frac full full_like gather ge gt index_select inner isfinite isinf isnan kron layer_norm le lerp linspace log "
    "log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor logsumexp lt masked_fill matmul max "
    "max_pool1d max_pool2d max_pool3d maximum mean median meshgrid min minimum mm moveaxis movedim mul multiply "
    "narrow ne neg norm "
    "ones ones_like outer permute pixel_shuffle pixel_unshuffle pow prelu prod reciprocal relu relu_ remainder "
    "repeat_interleave reshape rms_norm roll rot90 round rsqrt rsub scatter select selu sigmoid sign sin sinh softmax "
    "log_softmax sort split sqrt square squeeze stack std std_mean sub subtract sum swapaxes swapdims t take_along_dim "
    "tan tanh tensordot tensor_split tile topk transpose tril triu true_divide unbind unflatten unsqueeze var "
    "var_mean vstack hstack where zeros zeros_like adaptive_avg_pool1d avg_pool1d group_norm batch_norm "
    "instance_norm"
)
FUNCTIONAL = words(
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d affine_grid alpha_dropout avg_pool1d avg_pool2d avg_pool3d batch_norm celu conv1d conv2d "
    "conv3d conv_transpose1d conv_transpose2d conv_transpose3d cosine_similarity dropout dropout1d dropout2d dropout3d "
    "elu embedding fold gelu glu grid_sample group_norm hardshrink hardsigmoid hardswish hardtanh instance_norm "
    "interpolate layer_norm leaky_relu linear local_response_norm log_softmax logsigmoid max_pool1d max_pool2d "
    "max_pool3d mish multi_head_attention_forward normalize one_hot pad pixel_shuffle pixel_unshuffle prelu relu relu6 "
    "relu_ rms_norm scaled_dot_product_attention selu sigmoid silu softmax softmin softplus softshrink softsign tanh "
    "tanhshrink threshold unfold upsample"
)
FACTORIES = ("arange", "eye", "full", "linspace", "ones", "zeros")  # they make tensors of numbers alone
LINALG = ("norm", "vector_norm")
FFT = words("fft fft2 fftn ifft ifft2 ifftn irfft irfft2 irfftn rfft rfft2 rfftn")

METHODS = frozenset(
    words(
        "abs abs_ add add_ addcmul all amax amin any argmax argmin argsort baddbmm bfloat16 bmm bool broadcast_to "
        "ceil chunk clamp clamp_ clamp_max clamp_min clip clone contiguous copy_ cos cumprod cumsum detach diagonal "
        "diff dim div div_ double eq erf exp exp_ expand expand_as fill_ flatten flip float floor floor_divide "
        "fmod gather ge gt half index_select int isfinite isinf isnan le lerp log log1p log2 log_softmax logical_and "
        "logical_not logical_or logsumexp long lt masked_fill masked_fill_ matmul max maximum mean median min minimum "
        "mm movedim moveaxis mul mul_ narrow ne neg neg_ new_empty new_full new_ones new_zeros norm numel outer "
        "permute pow prod reciprocal relu relu_ remainder repeat repeat_interleave reshape reshape_as roll round rsqrt "
        "scatter select sigmoid sigmoid_ sign sin size softmax sort split split_with_sizes sqrt square squeeze std sub "
        "sub_ sum swapaxes swapdims t tanh tanh_ tensor_split tile to topk transpose transpose_ tril triu true_divide "
        "type_as unbind unflatten unfold unsqueeze unsqueeze_ var view view_as where zero_"
    )
)
ATTRIBUTES = frozenset(("shape", "dtype", "device", "ndim", "T", "mT", "data", "real", "imag", "values", "indices"))
MANY = (str, bytes, tuple, list, dict)
PIECES = frozenset(("split", "split_with_sizes", "tensor_split", "chunk", "unbind"))
SUMS = frozenset(("add", "radd", "iadd", "sub", "rsub", "isub", "subtract"))


def _arithmetic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Python's operator for tensors and plain numbers; text and lists could grow without bound."""

    power = function in (operator.pow, operator.ipow)

    def checked(*values: Any) -> Any:
        for value in values:
            if isinstance(value, MANY):
                return _of_tuples(function, values)
        if power and not any(isinstance(v, Tensor | fx.Proxy) for v in values) and any(abs(v) > 1024 for v in values):
            raise ValueError("a power of numbers beyond 1024")
        result = function(*values)
        if isinstance(result, int) and abs(result) > LARGEST_NUMBER:
            raise ValueError(f"a number beyond {LARGEST_NUMBER}")
        return result

    return checked


def _of_tuples(function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    """Sizes may be joined and compared."""
    tuples = all(isinstance(value, tuple | list) for value in values)
    if function in (operator.eq, operator.ne) or (function is operator.add and tuples and sum(map(len, values)) <= 64):
        return function(*values)
    raise ValueError(f"{function.__name__} of {' and '.join(type(value).__name__ for value in values)}")


def _getitem(of: Any, key: Any) -> Any:
    """Of a tensor or of several values; a tracer that cannot see it is told."""
    if not isinstance(of, Tensor | fx.Proxy | tuple | list):
        raise ValueError(f"an item of {type(of).__name__}")
    if isinstance(of, Tensor) and (proxy := proxy_among(key)) is not None:  # of a buffer, by a size
        return proxy.tracer.create_proxy("call_function", operator.getitem, (of, key), {})
    item: Any = of[key]  # type: ignore[index]  # a proxy has items, too
    return item


def _factory(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes tensors of numbers alone; a tracer does not see it, and is told."""

    def told(*args: Any, **named: Any) -> Any:
        if (proxy := proxy_among((args, named))) is not None:
            return proxy.tracer.create_proxy("call_function", function, args, named)
        return function(*args, **named)

    return told


def proxy_among(values: Any) -> fx.Proxy | None:
    """One that stands for a result in a trace, if there is any."""
    if isinstance(values, fx.Proxy):
        return values
    if isinstance(values, slice):
        values = (values.start, values.stop, values.step)
    inside = values.values() if isinstance(values, dict) else values if isinstance(values, tuple | list) else ()
    return next((found for value in inside if (found := proxy_among(value)) is not None), None)


def _setitem(of: Any, key: Any, value: Any) -> None:
    """Writes into a tensor; a tracer that knows no such call is told of it."""
    if isinstance(of, fx.Proxy):
        of.tracer.create_proxy("call_function", operator.setitem, (of, key, value), {})
    elif isinstance(of, Tensor):
        of[key] = value
    else:
        raise ValueError(f"an item of {type(of).__name__} cannot be set")


def _functions() -> tuple[dict[str, Callable[..., Any]], dict[Any, str]]:
    """What runs, by name; and the name of what a tracer meets."""
    run: dict[str, Callable[..., Any]] = {"operator.getitem": _getitem, "operator.setitem": _setitem}
    names: dict[Any, str] = {operator.getitem: "operator.getitem", operator.setitem: "operator.setitem"}
    for name in ARITHMETIC:
        function = getattr(operator, name)
        run[f"operator.{name}"], names[function] = _arithmetic(function), f"operator.{name}"
    factories = [getattr(torch, name) for name in FACTORIES]
    for prefix, module, known in (
        ("torch", torch, TORCH),
        ("functional", F, FUNCTIONAL),
        ("linalg", torch.linalg, LINALG),
        ("fft", torch.fft, FFT),
    ):
        for name in known:
            if (function := getattr(module, name, None)) is not None:  # not every torch has all of them
                run[f"{prefix}.{name}"] = _factory(function) if function in factories else function
                names.setdefault(function, f"{prefix}.{name}")
    return run, names


FUNCTIONS, NAMES = _functions()

# modules

PLAIN = words(  # the arguments of their constructors are attributes of the same names
    "Linear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d "
    "BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d LayerNorm "
    "GroupNorm RMSNorm LocalResponseNorm "
    "ReLU ReLU6 LeakyReLU PReLU ELU SELU CELU GELU SiLU Mish Hardswish Hardsigmoid Hardtanh Sigmoid Tanh Softplus "
    "Softsign Softmax Softmin Softmax2d LogSoftmax LogSigmoid Tanhshrink Hardshrink Softshrink GLU Threshold "
    "MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d LPPool1d LPPool2d "
    "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d "
    "Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout Flatten Unflatten Identity "
    "ZeroPad1d ZeroPad2d ZeroPad3d ConstantPad1d ConstantPad2d ConstantPad3d ReflectionPad1d ReflectionPad2d "
    "ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d CircularPad1d CircularPad2d CircularPad3d "
    "Upsample UpsamplingNearest2d UpsamplingBilinear2d PixelShuffle PixelUnshuffle ChannelShuffle Fold Unfold "
    "CosineSimilarity Embedding MultiheadAttention TransformerEncoderLayer"
)
RECURRENT = ("RNN", "LSTM", "GRU")
RECURRENT_ARGUMENTS = words("input_size hidden_size num_layers bias batch_first dropout bidirectional")
MODULES: Mapping[str, type[nn.Module]] = {
    **{name: getattr(nn, name) for name in (*PLAIN, *RECURRENT, "TransformerEncoder") if hasattr(nn, name)},
    "ScaleShift": ScaleShift,  # ours: a folded BatchNorm
    "WindowAttention": WindowAttention,  # ours: torchvision's attention within windows, opened
    "WindowAttentionV2": WindowAttentionV2,
}
MANIFOLD = (  # of many modules each
    *("MultiheadAttention", "TransformerEncoderLayer", "TransformerEncoder", "WindowAttention", "WindowAttentionV2"),
    *RECURRENT,
)
MOST_LAYERS = 1024  # of these in a network, those inside encoders counted: they take memory even without storage
