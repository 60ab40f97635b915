"""Count what a step compiled by Inductor keeps in memory, without compiling it.

AOTAutograd traces the model on the meta device, by Inductor's decompositions, and splits it into graphs of forward and
backward. Inductor's own part is modeled: which results its kernels write to memory, and when each is freed. A
`CompiledModel` allocates these on the meta device.

- Matrix products, convolutions, attention and all else that is not fused write their results; reductions do, too.
- Of fused operations only those write that one of the former reads, that backward or the optimizer needs, or that
  would otherwise read many others again.
- A result of fused operations takes the memory of an input of the same shape that nothing else reads.
- What only enlarges a gradient, such as its conversion to float32, waits until the end (`reorder_for_peak_memory`).
"""

import functools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from paceline.models.meta_gpu import MetaGpu

aten = torch.ops.aten
_TRACED_IMAGES: Final = 509
"""Images of the batch that is traced: a prime, so that sizes which it divides are those that grow with the batch."""
_REDUCTIONS: Final = frozenset(
    (
        *(aten.sum, aten.mean, aten.var, aten.var_mean, aten.amax, aten.amin, aten.argmax, aten.argmin, aten.prod),
        *(aten.any, aten.all, aten.max, aten.min, torch.ops.prims.sum, torch.ops.prims.var),
    )
)
_SCATTERS: Final = frozenset((aten.scatter, aten.scatter_add, aten.scatter_reduce, aten.index_put))
"""They write to a result that a kernel of the same fused operations has begun."""
_RANDOM: Final = frozenset((aten.rand, aten.rand_like, aten.randn, aten.randn_like, aten.bernoulli))
_LOGIT_DIMS: Final = 2
_MAX_READS: Final = 8
"""Buffers that a result may read without being written."""
_MAX_SHARED_READS: Final = 4
"""Those of a result that is used twice: Inductor's `realize_reads_threshold`."""


class Buffer(NamedTuple):
    """A result in memory: numbers of `dtype`, `per_image` and `fixed` ones."""

    name: str
    dtype: torch.dtype
    per_image: int
    fixed: int

    def allocate(self, images: int) -> Tensor:
        """Return its memory [numbers] on the meta device."""
        return torch.empty(self.fixed + images * self.per_image, dtype=self.dtype, device="meta")


class CompiledKernel(NamedTuple):
    """A kernel: the buffers that it writes, in memory of others (`reused`, by name) or not, and what is freed then."""

    written: tuple[Buffer, ...]
    reused: dict[str, str]
    freed: tuple[str, ...]


@dataclass(frozen=True)
class CompiledGraphs:
    """The kernels of both passes, and the names of buffers: the `output`, those `saved` for backward, the `gradients`.

    `output` has `num_classes` numbers per image. Gradients are in the order of parameters, None without one.
    """

    forward: tuple[CompiledKernel, ...]
    backward: tuple[CompiledKernel, ...]
    output: str
    num_classes: int
    saved: dict[str, str]
    gradients: tuple[str | None, ...]


class CompiledModel(nn.Module):
    """A model on the meta device that allocates what its compiled code would."""

    def __init__(self, model: nn.Module, graphs: CompiledGraphs) -> None:
        super().__init__()
        self.model, self.graphs = model, graphs

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [N, classes]."""
        output: Tensor = _Replay.apply(self.graphs, images, *self.model.parameters())
        return output


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: CompiledGraphs, images: Tensor, *parameters: Tensor) -> Tensor:
        ctx.graphs, ctx.num_images, ctx.parameters = graphs, len(images), parameters
        buffers: dict[str, Tensor] = {}
        _run(graphs.forward, buffers, len(images))
        ctx.saved = {name: buffers[source] for name, source in graphs.saved.items()}
        ctx.images = images  # backward of the first layer may read them
        shape = len(images), graphs.num_classes
        return buffers[graphs.output][: math.prod(shape)].view(shape)  # logits may be a part of a result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        buffers = ctx.saved
        _run(ctx.graphs.backward, buffers, ctx.num_images)
        found = [
            None if name is None else buffers[name].as_strided(parameter.shape, parameter.stride())
            for name, parameter in zip(ctx.graphs.gradients, ctx.parameters, strict=True)
        ]
        del ctx.saved, ctx.images
        return None, None, *found


def _run(kernels: Iterable[CompiledKernel], buffers: dict[str, Tensor], images: int) -> None:
    for kernel in kernels:
        for buffer in kernel.written:
            old = kernel.reused.get(buffer.name)
            buffers[buffer.name] = buffer.allocate(images) if old is None else buffers.pop(old)
        for name in kernel.freed:
            buffers.pop(name, None)


def trace_compiled(
    model: nn.Module,
    shape: Sequence[int],
    precision: torch.dtype | None,
    gpu: MetaGpu,
    memory_format: torch.memory_format = torch.channels_last,
) -> CompiledGraphs:
    """Trace a model on the meta device for images of `shape` [C, H, W] under autocast to `precision`, None for none.

    Raise what the model or torch raise for what cannot be traced, and `ValueError` for outputs other than one tensor
    and for a model without a parameter to train.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import lowering  # noqa: F401  # decompositions need it
    from torch._inductor.decomposition import select_decomp_table

    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    values = [*model.parameters(), *model.buffers()]
    if any(each.numel() % _TRACED_IMAGES == 0 for each in values):
        raise ValueError(f"sizes that {_TRACED_IMAGES} divides are taken for those of batches")

    def call(images: Tensor, *values: Tensor) -> Tensor:
        with gpu, gpu.autocast(precision):
            output = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (images,))
        if not isinstance(output, Tensor) or output.dim() != _LOGIT_DIMS:
            raise ValueError("the output is not one tensor [N, classes]")
        return output

    def split(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        # Weights stay in memory anyway, so that backward may read them at no cost.
        static = list(range(1, 1 + len(values)))
        forward, backward = min_cut_rematerialization_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static
        )
        raise _Split(forward.graph, backward.graph, num_fwd_outputs)

    def refuse(gm: fx.GraphModule, example_inputs: Any) -> Any:  # names of torch's protocol
        raise ValueError("the model has no parameter to train")

    traced = aot_function(call, refuse, partition_fn=split, decompositions=select_decomp_table())
    dtype = next((each.dtype for each in values if each.is_floating_point()), torch.float32)
    images = torch.empty((_TRACED_IMAGES, *shape), dtype=dtype, device="meta")
    try:
        traced(images.contiguous(memory_format=memory_format), *values)
    except _Split as found:
        return _build_graphs(found.forward, found.backward, found.num_outputs, len(list(model.parameters())))
    raise AssertionError("AOTAutograd did not split the graph")


class _Split(Exception):  # noqa: N818  # ends the trace, as nothing is compiled
    def __init__(self, forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> None:
        super().__init__()
        self.forward, self.backward, self.num_outputs = forward, backward, num_outputs


def _build_graphs(forward: fx.Graph, backward: fx.Graph, num_outputs: int, num_parameters: int) -> CompiledGraphs:
    results = _list_outputs(forward)
    saved = {node.name: node for node in results[num_outputs:] if node is not None and node.op != "placeholder"}
    placeholders = [node for node in backward.nodes if node.op == "placeholder"]
    schedule = _Schedule(forward)
    logits = results[num_outputs - 1]  # after the buffers that the model changes, such as running means
    assert logits is not None
    _defer_growth(backward)
    gradients = _list_outputs(backward)[1 : 1 + num_parameters]
    sources = {name: root.name for name, node in saved.items() if (root := schedule.root(node)).op != "placeholder"}
    freed = frozenset(node for node in placeholders if node.name in sources)
    owners = Counter([*sources.values(), schedule.root(logits).name])
    alone = frozenset(node for node in freed if owners[sources[node.name]] == 1)
    reversed_schedule = _Schedule(backward, freed, alone)
    return CompiledGraphs(
        tuple(schedule.kernels()),
        tuple(reversed_schedule.kernels()),
        schedule.root(logits).name,
        logits.meta["val"].shape[1],
        sources,
        tuple(None if node is None else reversed_schedule.root(node).name for node in gradients),
    )


def _list_outputs(graph: fx.Graph) -> list[Node | None]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    return list(output.args[0])


def _defer_growth(graph: fx.Graph) -> None:
    """Move to the end what reads one result, writes a larger one, and is read by nobody."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    for node in list(graph.nodes):
        if node.op == "call_function" and list(node.users) == [output] and len(node.all_input_nodes) == 1:
            (source,) = node.all_input_nodes
            if len(source.users) == 1 and _num_bytes(source) < _num_bytes(node):
                output.prepend(node)


def _num_bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


class _Schedule:
    """The kernels of a graph. Inputs that are `freed` end with it; those that are `alone` share no memory."""

    def __init__(
        self, graph: fx.Graph, freed: frozenset[Node] = frozenset(), alone: frozenset[Node] = frozenset()
    ) -> None:
        self._nodes = list(graph.nodes)
        self._place = {node: place for place, node in enumerate(self._nodes)}
        self._freed, self._alone = freed, alone
        self._outputs = {self.root(node) for node in _list_outputs(graph) if node is not None}
        self._written: set[Node] = set()
        self._reads: dict[Node, frozenset[Node]] = {}
        """The buffers that each node reads, directly or through results that are not written."""
        for node in self._nodes:
            if node.op == "call_function" and not self._is_view(node):
                self._add(node)

    def root(self, node: Node) -> Node:
        """Return the node whose result a view shows."""
        while self._is_view(node):
            node = node.args[0]  # type: ignore[assignment]
            assert isinstance(node, Node)
        return node

    def kernels(self) -> Iterator[CompiledKernel]:
        """Yield the kernels in order."""
        last_read: dict[Node, int] = dict.fromkeys(self._freed, -1)
        for node in self._written:
            for each in (*self._reads[node], *self._buffers_of(node)):
                last_read[each] = max(last_read.get(each, 0), self._place[node])
        freed_at: dict[int, list[Node]] = {}
        for node, place in last_read.items():
            if node not in self._outputs and (node.op != "placeholder" or node in self._freed):
                freed_at.setdefault(place, []).append(node)
        for node in sorted(self._written, key=self._place.__getitem__):
            freed = freed_at.get(self._place[node], [])
            reused: dict[str, str] = {}
            buffers = self._buffers_of(node)
            for each in buffers if _is_fused(node) else ():
                same = [old for old in freed if old not in buffers and self._can_reuse(old, each)]
                if same:
                    reused[each.name] = same[0].name
                    freed.remove(same[0])
            yield CompiledKernel(tuple(map(_describe, buffers)), reused, tuple(old.name for old in freed))

    def _can_reuse(self, old: Node, new: Node) -> bool:
        values = old.meta["val"], new.meta["val"]
        is_alone = old.op != "placeholder" or old in self._alone
        return is_alone and values[0].dtype == values[1].dtype and values[0].numel() == values[1].numel()

    def _add(self, node: Node) -> None:
        if node.target is operator.getitem:  # a result of a kernel
            return
        inputs = {self.root(each) for each in node.all_input_nodes}
        reads: set[Node] = set()
        for each in inputs:
            source = each.args[0] if each.target is operator.getitem else each
            is_buffer = each.op == "placeholder" or source in self._written
            reads |= {each} if is_buffer else self._reads.get(each, frozenset())
        self._reads[node] = frozenset(reads)
        if self._is_written(node):
            self._written.add(node)

    def _is_written(self, node: Node) -> bool:
        if not _is_fused(node) or getattr(node.target, "overloadpacket", None) in _REDUCTIONS | _SCATTERS:
            return True
        if not isinstance(node.meta.get("val"), Tensor) or node in self._outputs:
            return True
        users = list(self._users(node))
        reads_many = len(self._reads[node]) > (_MAX_SHARED_READS if len(users) > 1 else _MAX_READS)
        return reads_many or any(not _is_fused(each) for each in users)

    def _users(self, node: Node) -> Iterator[Node]:
        for user in node.users:
            if self._is_view(user):
                yield from self._users(user)
            elif user.op == "call_function":
                yield user

    def _buffers_of(self, node: Node) -> list[Node]:
        if isinstance(node.meta.get("val"), Tensor):
            return [node]
        results = (user for user in node.users if user.target is operator.getitem)
        return [each for each in results if isinstance(each.meta.get("val"), Tensor)]

    def _is_view(self, node: Node) -> bool:
        if node.op != "call_function":
            return False
        if node.target is operator.getitem:
            return self._is_view(node.args[0])  # type: ignore[arg-type]
        return getattr(node.target, "is_view", False)


def _describe(node: Node) -> Buffer:
    value = node.meta["val"]
    numbers = value.numel()
    grows = numbers % _TRACED_IMAGES == 0
    return Buffer(node.name, value.dtype, numbers // _TRACED_IMAGES if grows else 0, 0 if grows else numbers)


@functools.cache
def _fused_operations() -> frozenset[Any]:
    from torch._functorch.partitioners import get_default_op_list

    return frozenset(get_default_op_list().fusible_ops) | _RANDOM | _SCATTERS


def _is_fused(node: Node) -> bool:
    target = node.target
    return target in _fused_operations() or getattr(target, "overloadpacket", target) in _fused_operations()
