"""Which network an artifact is of: one that has a name here, one that is traced, or one that a factory makes."""

import json
import re
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import is_parametrized

from dubito.models.artifact.trial import Trial, check_width
from dubito.models.conversion.architectures import build, check_permitted, is_factory, on_meta, only_factory, remember
from dubito.models.conversion.conversion import REMOVE, assemble, norm_hook
from dubito.models.errors import ArtifactError
from dubito.models.manifest import Architecture, Manifest
from dubito.models.network.feature_bank import FeatureBank
from dubito.models.network.joint import JOINT
from dubito.models.network.network import BayesianNetwork
from dubito.models.network.normalisation import fold_batchnorm
from dubito.models.numerics.parameters import Free, Positive
from dubito.models.traced import TorchModule, Traced
from dubito.models.tracing.rebuild import Container, TracedNetwork, rebuild, try_out
from dubito.models.tracing.trace import TraceError, changed_by_hand, trace

OURS = "dubito."
COPY = re.compile(r"\.copies\.\d+")  # the place of one member's own module in a name
ANSWERS: dict[str, tuple[int, ...]] = {}  # their shapes, by name, arguments and the input's shape as JSON
MOST_ANSWERS = 64


def bare_by(manifest: Manifest) -> nn.Module:
    """The plain network that a manifest describes; call it where tensors have no storage."""
    name, arguments = manifest.architecture.name, manifest.architecture.arguments
    if manifest.traced is not None:
        return rebuild(manifest.traced)
    if name == "custom" and (only := only_factory()) is not None:
        name = only
    if name == "custom":
        raise ArtifactError(
            "it says nothing of its network: give the factory that makes it with --network package.module:factory, "
            "or load it with load(path, network=the nn.Module you converted)."
        )
    check_permitted(name)
    return build(name, **arguments)


def check_input(bare: nn.Module, manifest: Manifest) -> None:
    """That a network takes the inputs that the manifest declares, with outputs to match, before it has storage."""
    declared = manifest.card.input
    if declared is None or (manifest.traced is None and not on_meta(manifest.architecture.name)):
        return
    if manifest.traced is not None and manifest.traced.input not in (None, declared.shape):
        came = f"takes inputs of shape {manifest.traced.input}, but it declares {declared.shape}"
        raise ArtifactError(f"its network {came}.")
    check_width(_answer_of(bare, manifest, declared.shape), manifest)


def _answer_of(bare: nn.Module, manifest: Manifest, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the network's answer to one input; one that has a name here is tried out once for its arguments."""
    if manifest.traced is not None:
        return try_out(bare, shape)
    named = json.dumps([manifest.architecture.name, manifest.architecture.arguments, shape], sort_keys=True)
    if (answer := ANSWERS.get(named)) is None:
        answer = try_out(bare, shape)
        if len(ANSWERS) >= MOST_ANSWERS:
            ANSWERS.clear()
        ANSWERS[named] = answer
    return answer


def skeleton_of(bare: nn.Module, manifest: Manifest) -> BayesianNetwork:
    network = assemble(bare, manifest.layers, manifest.members, manifest.hierarchy, manifest.task, "prior")
    remember(network.net, manifest.architecture)
    if manifest.joint is not None:
        network.set_joint(JOINT[manifest.joint.method].blank(manifest.joint))
    if manifest.feature_bank is not None:
        network.set_feature_bank(FeatureBank.blank(manifest.feature_bank))
    return fold_batchnorm(network) if manifest.batchnorm == "folded" else network


def state_and_masks(network: BayesianNetwork) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a network but for its masks, and the masks of pruned tensors by their places."""
    state = network.state_dict()
    named = network.named_modules(remove_duplicate=False)
    masked = {name for name, part in named if isinstance(part, Free | Positive) and part.keep is not None}
    masks = {name: state.pop(f"{name}.keep") for name in masked}
    return dict(state), masks


def set_masks(network: BayesianNetwork, masks: dict[str, Tensor]) -> None:
    """Of pruned tensors, by the place of the tensor."""
    for place, keep in masks.items():
        part = network.get_submodule(place)
        assert isinstance(part, Free | Positive)
        part.keep = keep.to(next(part.parameters()).device)


def maybe_infinite(network: BayesianNetwork) -> set[str]:
    """Buffers that may hold ±infinity: those of the user's own modules, as attention masks; no statistics of training.

    torch's BatchNorms and our own modules have statistics; infinity in them is a training that diverged.
    """
    return {
        f"{name}.{key}"
        for name, module in network.named_modules(remove_duplicate=False)
        if isinstance(module, Container)
        or not (isinstance(module, _NormBase) or type(module).__module__.startswith(OURS))
        for key in module._buffers
    }


def describe_network(network: BayesianNetwork, manifest: Manifest) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest with what rebuilds the network, and the tensors of it that the network's state does not hold."""
    known, net = manifest.architecture, network.net
    before = net.calls.described if isinstance(net, TracedNetwork) else None
    described = manifest if before is None else _with(manifest, known, before)
    has_name = before is not None or (known.name != "custom" and not is_factory(known.name))
    if has_name:
        with torch.device("meta"):
            bare = bare_by(described)
            if _is_still(network, bare, described) and not any(map(changed_by_hand, net.modules())):
                check_input(bare, described)
                return described, {}
    declared = manifest.card.input
    shape = before.input if before is not None and declared is None else None if declared is None else declared.shape
    try:
        traced, constants = trace(net, shape)
        by_trace = _with(manifest, known if is_factory(known.name) else Architecture(name="custom"), traced)
        return by_trace, _prove(network, by_trace, constants, shape)
    except (TraceError, ArtifactError) as error:
        if is_factory(known.name):
            with torch.device("meta"):
                still = _is_still(network, bare_by(manifest), manifest)
            if still:
                _prove_by_name(network, manifest, shape)
                return manifest, {}
        raise ArtifactError(f"{error}{_advice(net)}") from None


def _advice(net: nn.Module) -> str:
    """What may help where a network cannot be written as data."""
    for name, module in net.named_modules():
        if is_parametrized(module):
            tensor = next(iter(module.parametrizations))
            call = f"parametrize.remove_parametrizations(layer, {tensor!r})"
        elif (hook := norm_hook(module)) is not None:
            call = f"{REMOVE[hook]}(layer)"
        else:
            continue
        return (
            f" {name or 'The network'} computes its weights anew in each pass: before bayesianize, "
            f"torch.nn.utils.{call} keeps them as they are."
        )
    return ""


def _with(manifest: Manifest, architecture: Architecture, traced: Traced) -> Manifest:
    return manifest.model_copy(
        update={"format": max(4, manifest.format), "architecture": architecture, "traced": traced}
    )


def _is_still(network: BayesianNetwork, bare: nn.Module, manifest: Manifest) -> bool:
    """Whether it is the network that the manifest describes: a changed head would not come back."""
    again = skeleton_of(bare, manifest)
    shapes = [{name: t.shape for name, t in state_and_masks(one)[0].items()} for one in (network, again)]
    return shapes[0] == shapes[1] and repr(network.net) == repr(again.net)


def _trial_of(network: BayesianNetwork, manifest: Manifest, shape: tuple[int, ...] | None) -> Trial | None:
    """A network that declares no inputs is not served, so its answers are only to come back, if it ever gave any."""
    if shape is not None:
        trial = Trial.of(network, shape)
        trial.check(network, manifest)
        return trial
    if network.learned.inputs is None:
        return None
    with suppress(ArtifactError):
        return Trial.of(network, network.learned.inputs)
    return None


def _prove_by_name(network: BayesianNetwork, manifest: Manifest, shape: tuple[int, ...] | None) -> None:
    """Let its factory make the network anew, as `load` does, and compare the answers."""
    trial = _trial_of(network, manifest, shape)
    like = next(network.parameters(), None)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.seed()  # tensors that the factory draws are others each time
        again = skeleton_of(bare_by(manifest), manifest)
    again = again if like is None else again.to(like.device)
    kinds = {t.dtype for t in (*network.parameters(), *network.buffers()) if t.is_floating_point()}
    again = again.to(kinds.pop()) if len(kinds) == 1 else again  # several are its factory's own
    (state, masks), own = state_and_masks(network), dict(network.named_buffers())
    again.load_state_dict(state)
    set_masks(again, masks)
    lost = [
        name
        for name, t in again.named_buffers()
        if name in own and name not in state and not torch.equal(t, own[name].to(t.device, t.dtype))
    ]
    if bool(lost) if trial is None else not trial.agrees(again):
        what = f"Its buffer {lost[0].removeprefix('net.')!r}" if lost else "Something that it computes with"
        raise ArtifactError(
            f"the network is not what its factory {manifest.architecture.name} makes anew with the same weights: it "
            f"answers differently. {what} is not in its state dict: register tensors as parameters or as persistent "
            "buffers, keep modules in an nn.ModuleList, and change nothing once the factory has made it."
        )


def _ends_in_sigmoid(traced: Traced) -> bool:
    last = traced.calls[-1] if traced.calls and traced.output == {"#": len(traced.calls)} else None
    if last is None or last.do != "module":
        return last is not None and last.of in ("sigmoid", "torch.sigmoid")
    part = traced.parts.get(last.of)
    return isinstance(part, TorchModule) and part.kind == "Sigmoid"


def _prove(
    network: BayesianNetwork, manifest: Manifest, constants: dict[str, Tensor], shape: tuple[int, ...] | None
) -> dict[str, Tensor]:
    """Rebuild the traced network from its description, and compare the answers; the tensors that it needed besides."""
    assert manifest.traced is not None
    with torch.device("meta"):
        bare = rebuild(manifest.traced)
        if shape is not None:
            try_out(bare, shape)
        again = skeleton_of(bare, manifest)
    (state, masks), buffers = state_and_masks(network), dict(network.named_buffers())
    unsaved: dict[str, Tensor] = {}
    for name in again.state_dict().keys() - state.keys():
        if (held := buffers.get(name)) is None:
            place = name.removeprefix("net.")
            held = constants[place if place in constants else COPY.sub("", place)]
        unsaved[name] = held
    if (trial := _trial_of(network, manifest, shape)) is None:
        return unsaved
    if shape is not None and manifest.task.kind == "classification" and _ends_in_sigmoid(manifest.traced):
        raise ArtifactError(
            "the network ends in a Sigmoid, as one that gives several labels at once. Expected a logit for each class, "
            "of which one is true: leave out the Sigmoid if that is so; several labels are not served."
        )
    device = next(iter(state.values())).device
    again.load_state_dict(state | {name: t.to(device) for name, t in unsaved.items()}, assign=True)
    set_masks(again, masks)
    if not trial.agrees(again):
        raise ArtifactError(
            "the network cannot be written as data: its forward method answers differently when it is followed step "
            "by step. It may draw random numbers, keep a state, or ask for the type of its input."
        )
    trial.check_loaded(again)
    return unsaved
