"""Where the arrays of an engine lie if its model is split over several devices.

The engine has one axis of devices, `model`: KV heads are split over it, and all other axes of a
cache are whole on every device. More sequences take more servers.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv.serve.engine.model import Model
from jaxkv.serve.engine.pool import Layout, Pool
from jaxkv.state import sharding


def is_split(model: Model) -> bool:
    """Whether the model is split over several devices."""
    return model.mesh is not None


def shardings(model: Model, tree: Any) -> Any:
    """The sharding of every array of a tree: caches by KV head, other arrays whole.

    A cache is known by the structure of its policy's `leaves`, anywhere in the tree.
    """
    heads = sharding.axes_in(model.mesh)[1]
    replicated = NamedSharding(model.mesh, PartitionSpec())
    by_structure = {}
    for policy in model.programs:
        specs = sharding.specs(policy.leaves, None, heads)
        place = lambda spec: NamedSharding(model.mesh, spec)
        by_structure[jax.tree.structure(policy.leaves)] = jax.tree.map(place, specs)
    types = {type(policy.leaves) for policy in model.programs}
    is_state = lambda node: type(node) in types and jax.tree.structure(node) in by_structure

    def of_node(node: Any) -> Any:
        return by_structure[jax.tree.structure(node)] if is_state(node) else replicated

    return jax.tree.map(of_node, tree, is_leaf=is_state)


def pool_shardings(model: Model, layout: Layout, shapes: Pool) -> Pool:
    """The sharding of every array of a pool, which begins with an axis of pages or records.

    XLA splits no array of size 0.
    """
    leaves = jax.tree.leaves([policy.leaves for policy in model.policies])
    specs = sharding.specs(leaves, None, sharding.axes_in(model.mesh)[1])
    places = [NamedSharding(model.mesh, spec) for spec in specs]
    pairs = zip(places, layout.axes, strict=True)
    places = Pool([place for place, axis in pairs if axis is not None], places)
    replicated = NamedSharding(model.mesh, PartitionSpec())
    return jax.tree.map(lambda leaf, place: place if leaf.size else replicated, shapes, places)


def placed_pool(model: Model, layout: Layout, shapes: Pool) -> Pool:
    """The shapes of a pool with the sharding of each."""
    if not is_split(model):
        return shapes
    return with_sharding(shapes, pool_shardings(model, layout, shapes))


def placed(model: Model, tree: Any) -> Any:
    """The shapes of a tree with the sharding of each; arrays that are placed stay as they are."""
    return with_sharding(tree, shardings(model, tree)) if is_split(model) else tree


def with_sharding(tree: Any, places: Any) -> Any:
    """The shapes of a tree with these shardings, but arrays that have one keep their own."""

    def of_leaf(leaf: Any, place: NamedSharding) -> Any:
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(of_leaf, tree, places)
