"""Choose the weights of a model that become OSFT factors, by the source, the model, or a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardkit.core.factored import Svd, Target, factor_of, target_of
from shardkit.core.text import count, escape
from shardkit.errors import LayoutError, UsageError
from shardkit.layout.classes import transformers_model
from shardkit.osft.modules import candidates, factor_modules, factors_of, osft_modules
from shardkit.osft.plan import Candidate, OsftPlan, choose_targets
from shardkit.osft.training.factorise import fill_factors
from shardkit.training.fill.reading import Filled
from shardkit.training.fill.strategy import FillPlan
from shardkit.training.ranks.local import ExpectedTensor, LocalShard


@dataclass(frozen=True, slots=True, kw_only=True)
class Factoring:
    """The weights of a model that are factors."""

    targets: tuple[Target, ...] = ()
    """In the model's order."""
    svd: Svd | None = None
    """The algorithm that computes them from dense weights; None if the source has the factors."""
    notes: tuple[str, ...] = ()

    @property
    def computed(self) -> frozenset[str]:
        """FQNs of the factors that are computed, not read."""
        computed = self.targets if self.svd is not None else ()
        return frozenset(name for target in computed for name in target.shapes)

    def read(self, expected: Mapping[str, ExpectedTensor]) -> dict[str, ExpectedTensor]:
        """Return the tensors to read for a model: dense weights in place of computed factors.

        Args:
            expected: parameters and buffers of the model, by FQN.
        """
        needed = {fqn: tensor for fqn, tensor in expected.items() if fqn not in self.computed}
        for target in self.targets if self.svd is not None else ():
            needed[target.weight] = ExpectedTensor(
                fqn=target.weight,
                shape=(target.rows, target.columns),
                dtype=torch.float32,
                kind="parameter",
                persistent=True,
            )
        return needed

    def fill(self, shards: Sequence[LocalShard], plan: FillPlan) -> Filled:
        """Fill the factors that are computed, as `fill_factors`; every rank calls it."""
        return Filled() if self.svd is None else fill_factors(self.targets, self.svd, shards, plan)


def factor_model(
    model: nn.Module,
    plan: OsftPlan | None,
    stored: Sequence[Target],
    *,
    grown: Collection[str] = (),
    has_source: bool = True,
) -> Factoring:
    """Replace a model's targets by factors on meta, and return the choice.

    Args:
        model: on meta, not wrapped; it may have factors already.
        plan: the caller's plan; None to follow model and source.
        stored: targets whose factors the source has, by the model's paths; empty for dense weights.
        grown: FQNs of parameters with more rows than in the source.
        has_source: whether there are weights to read.

    Raises:
        LayoutError: source, plan and model contradict each other, some weight cannot be divided, or a target has more
            rows than its weight in the source; lists all.
        UsageError: globs of the plan match nothing, or there is no source.
    """
    model_targets = own_targets(model)
    planned: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()
    if plan is not None:
        model_type = getattr(getattr(transformers_model(model), "config", None), "model_type", None)
        planned, notes = choose_targets(plan, _dense_candidates(model, model_targets), model_type)
    accounts = [
        (what, named)
        for what, named in (("the source", stored), ("the model", model_targets), ("osft=", planned))
        if named
    ]
    if not accounts:
        return Factoring()
    for what, targets in accounts[1:]:
        _compare(accounts[0][0], accounts[0][1], what, targets)
    targets = tuple(accounts[0][1])
    _refuse_grown(targets, grown)
    if not has_source:
        raise UsageError(
            "osft= divides weights, and without a source there are none",
            hint="give the model's weights as the source",
        )
    if not model_targets:
        factor_modules(model, targets)
    for name, parameter in model.named_parameters():
        if factor_of(name) is not None:  # whatever the dtype of the rest
            parameter.data = parameter.data.float()
    svd = None if stored else plan.svd if plan is not None else "exact"
    return Factoring(targets=targets, svd=svd, notes=notes)


def own_targets(model: nn.Module) -> tuple[Target, ...]:
    """Return the targets that a model already has as factors, regardless of the library that created or wrapped it.

    Raises:
        LayoutError: the factors of a weight do not match.
    """
    return tuple(
        target_of(
            path, {f"{path}.{name}": tuple(factor.shape) for name, factor in factors_of(module).items()}
        )
        for path, module in osft_modules(model).items()
    )


def dense_names(model: nn.Module, expected: Mapping[str, ExpectedTensor]) -> dict[str, ExpectedTensor]:
    """Return a model's parameters and buffers as if it had no factors."""
    return Factoring(targets=own_targets(model), svd="exact").read(expected)


def _dense_candidates(model: nn.Module, factored: Iterable[Target]) -> dict[str, Candidate]:
    """Return a model's parameters as if it had no factors yet."""
    dense = {name: weight for name, weight in candidates(model).items() if factor_of(name) is None}
    return dense | {target.weight: Candidate((target.rows, target.columns), "Linear") for target in factored}


def _compare(account: str, targets: Iterable[Target], rival: str, rival_targets: Iterable[Target]) -> None:
    """Refuse targets that differ between two of: source, model, plan."""
    by_path, rival_by_path = ({target.path: target for target in side} for side in (targets, rival_targets))
    problems = []
    for path in dict.fromkeys((*by_path, *rival_by_path)):
        shown, rival_shown = _target_text(by_path.get(path)), _target_text(rival_by_path.get(path))
        if shown != rival_shown:
            problems.append(f"{escape(path)}: {shown} in {account}, {rival_shown} in {rival}")
    LayoutError.raise_for(
        problems,
        f"{account} and {rival} differ in {count(len(problems), 'factor')}",
        hint="leave osft= out: names of tensors show which weights are factored",
    )


def _target_text(target: Target | None) -> str:
    if target is None:
        return "dense"
    return f"{target.rank} directions of [{target.rows}, {target.columns}] kept"


def _refuse_grown(targets: Iterable[Target], grown: Collection[str]) -> None:
    """Raise an error for targets with rows added for the tokenizer, which were not part of the decomposition."""
    longer = {factor_of(fqn) or fqn.removesuffix(".weight") for fqn in grown}
    problems = [
        f"{escape(target.weight)}: [{target.rows}, {target.columns}]"
        for target in targets
        if target.path in longer
    ]
    LayoutError.raise_for(
        problems,
        "OSFT targets have a row for each token, and the tokenizer needs more rows",
        hint="leave them dense (targets 'auto,!lm_head'), or align_vocab=False",
    )
