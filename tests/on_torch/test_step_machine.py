"""Random training programs, run by wrapped optimizers and by plain ones in float64, which scale nothing.

Every line of a program is run by both. A step has to end with the same parameters, skip where the model skips with
every bit as before, or be refused with nothing changed; and what polyamp documents as legal is not refused. A program
that fails is printed, so it can be run as it stands.
"""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import polyamp
from polyamp import LossScale, LossScaleState
from support.plain_steps import plain, same, trained
from support.torch_kinds import bits

PRELUDE = """\
from copy import deepcopy
import polyamp, torch
from polyamp import LossScale
from polyamp import wrap_optimizer as wrap

inf, weight = float("inf"), lambda dtype: torch.nn.Parameter(torch.tensor([1.0, -1.0], dtype=dtype))
S = lambda p: p.float().sum()  # a loss whose gradient is 1
trained = lambda opt: [p for group in opt.param_groups for p in group["params"]]
"""

FORMATS = {"mixed_float16": "float32", "float16": "float16", "mixed_bfloat16": "float32", "bfloat16": "bfloat16"}
SCALES = [
    "LossScale(init=8.0, interval=1, max=64.0)", "LossScale(init=64.0, max=64.0)", "LossScale(init=2.0, max=64.0)",
    "LossScale.fixed(4.0)", "LossScale.fixed(1.0)", "LossScale.skip_nonfinite()", "LossScale.none()",
]  # fmt: skip
OPTIMIZERS = [
    "SGD({}, lr=0.125)", "SGD({}, lr=0.125, momentum=0.5, foreach=True)", "SGD({}, lr=0.125, fused=True)",
    "AdamW({}, lr=0.125, foreach=False)", "AdamW({}, lr=0.125, fused=True)",
]  # fmt: skip
BAD = st.sampled_from(["", "", "", "", "", "", " * inf", " * (inf - inf)", " + inf"])
WHICH = st.integers(0, 2)
LOSS_IDS = st.sampled_from(["", "", "", ', loss_id="aux"'])
TERMS = st.lists(st.tuples(st.integers(0, 6), st.sampled_from([1, 2, -1, 0.5])), min_size=1, max_size=3)
ODD = "odd"  # the source of gradients that may be refused

Key = tuple[int, str, int] | str


class Loss:
    """The text of a loss, the parameters that its backward pass reaches, and whether it is finite."""

    def __init__(self, factors: dict[str, float], reached: set[str], bad: str) -> None:
        parts = [f"{factor} * S({name})" if factor != 1 else f"S({name})" for name, factor in factors.items()]
        self.text = f"({' + '.join(parts)}){bad}" if bad else " + ".join(parts)
        self.parts, self.reached, self.is_bad = parts, reached, bool(bad)


class Steps(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ours: dict[str, Any] = {}
        self.model: dict[str, Any] = {}
        self.lines: list[str] = []

    def teardown(self) -> None:
        self.ours.clear()  # wrapped optimizers live as long as somebody holds them
        self.model.clear()

    # --- running lines ------------------------------------------------------------------------------------------------

    @initialize(
        policy=st.sampled_from([*FORMATS]),
        owned=st.lists(st.integers(1, 2), min_size=1, max_size=3),
        together=st.booleans(),
        tied=st.sampled_from([False, False, False, True]),
        scales=st.lists(st.sampled_from([None, *SCALES]), min_size=3, max_size=3),
        optimizer=st.sampled_from(OPTIMIZERS),
        fused_step=st.sampled_from([None, False, True]),
        max_grad_norm=st.sampled_from([None, None, 1.0]),
        with_aux=st.booleans(),
    )
    def begin(
        self, policy: str, owned: list[int], together: bool, tied: bool, scales: list[str | None], optimizer: str,
        fused_step: bool | None, max_grad_norm: float | None, with_aux: bool,
    ) -> None:  # fmt: skip
        self.has_masters, self.clips = FORMATS[policy] != "float32", max_grad_norm is not None
        if policy == "float16":  # under the default of 2^16 its gradients would overflow
            scales = [scale or SCALES[0] for scale in scales]
        self.names = [f"p{place}" for place in range(sum(owned) + 1)]  # the last one has no optimizer yet
        self.opts = [f"o{place}" for place in range(len(owned))]
        self.groups = [0] * len(owned) if together else list(range(len(owned)))
        starts = [sum(owned[:place]) for place in range(len(owned))]
        self.owned = [self.names[start : start + count] for start, count in zip(starts, owned, strict=True)]
        self.sources: dict[str, set[Key]] = {name: set() for name in self.names}
        self.generations = [0] * len(owned)
        self.pending: dict[str, tuple[Loss, Key, int]] = {}
        self.unscaled: set[int] = set()  # optimizers all of whose gradients are unscaled
        self.elsewhere: set[int] = set()  # optimizers whose own loss reached no parameter of an optimizer
        self.clippable: set[int] = set()  # those that no backward pass has begun for since
        self.hooked: set[str] = set()
        self.looked: set[int] = set()  # optimizers for whose parameters `torch.autograd.grad` returned gradients
        self.seen: set[int] = set()  # optimizers since whose last step there was a backward pass
        self.saved: dict[int, list[str]] = {}
        self.count = 0
        self.configs = [eval(scale) if scale else polyamp.policy(policy).loss_scale for scale in scales]
        exec(PRELUDE, self.ours)
        exec(PRELUDE, self.model)
        self.model |= {"wrap": plain, "weight": lambda _: self.ours["weight"](torch.float64)}
        self._run(f"{self._all(self.names)} = (weight(torch.{FORMATS[policy]}) for _ in range({len(self.names)}))")
        options = {"fused_step": fused_step, "max_grad_norm": max_grad_norm}
        more = "".join(f", {name}={value}" for name, value in options.items() if value is not None)
        asked = [f'"{policy}"{f", loss_scale={scale}" if scale else ""}{more}' for scale in scales]

        def wrap(*, legal: bool) -> bool:
            made = [f"torch.optim.{optimizer.format(_list(names))}" for names in self.owned]
            calls = [f"wrap({one}, {options})" for one, options in zip(made, asked, strict=False)]
            wrapped = f"wrap([{', '.join(made)}], {asked[0]})" if together else self._all(calls)
            return self._run(f"{self._all(self.opts)} = {wrapped}", legal=legal)

        if tied and len(owned) > 1:
            self.owned[1].append(self.owned[0][-1])
            if not wrap(legal=False):
                self.owned[1].pop()
                wrap(legal=True)
        else:
            wrap(legal=True)
        self._run(f'with polyamp.autocast("{policy}"): pass')
        if with_aux:  # so that its scale may be another one
            self._run('o0.backward(S(p0), loss_id="aux"); o0.step(); o0.zero_grad()')
            self.generations[0] += 1
            self._clear_all()

    def _all(self, names: list[str]) -> str:
        return "".join(f"{name}, " for name in names).removesuffix(" ")

    def _run(self, line: str, *, legal: bool = True, backward: bool = False) -> bool:
        """Run a line on both sides; return whether it ran. A backward pass that is refused may have left gradients."""
        self.lines.append(line)
        before = self._bits()
        cleared = [self.model[name] for name in self._names(self.opts) if backward and self.model[name].is_clear()]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(line, self.ours)
                for name in self.model.keys() & self._names(self.opts):
                    self.model[name].skips = not getattr(self.ours[name].last_step, "applied", True)
                exec(line, self.model)
        except polyamp.PolyampError as error:
            self.lines[-1] += "  # refused"
            self._check(not legal, f"this is legal, and was refused: {error}")
            after = self._bits()
            if backward and after["grads"] != before["grads"]:
                before["grads"] = after["grads"]
                self._clear_all()
            changed = [part for part in before if after[part] != before[part]]
            self._check(not changed, f"it was refused, and changed {', '.join(changed)}")
            return False
        except Exception as error:
            error.add_note(self._program())
            raise
        for opt in cleared:  # another window: what was found before may be forgotten
            opt.may_skip |= opt.must_skip
            opt.must_skip = False
        return True

    def _names(self, names: list[str]) -> set[str]:
        return {name for name in names if name in self.ours}

    def _bits(self) -> dict[str, Any]:
        params = [self.ours[name] for name in self.names if name in self.ours]
        opts = [self.ours[name] for name in self.opts if name in self.ours]
        return {
            "params": [bits(param) for param in params],
            "grads": [None if param.grad is None else bits(param.grad) for param in params],
            "states": [_state(opt) for opt in opts],
            "scales": [opt.loss_scale for opt in opts],
        }

    def _check(self, holds: bool, what: str) -> None:
        assert holds, f"{what}\n{self._program()}"

    def _program(self) -> str:
        return "\n".join([PRELUDE, *self.lines])

    # --- what the gradients are ---------------------------------------------------------------------------------------

    def _loss(self, terms: list[tuple[int, float]], bad: str = "") -> Loss | None:
        """Return a loss; None if it would reach no parameter."""
        factors = {self.names[place % len(self.names)]: factor for place, factor in terms}
        reached = {name for name in factors if self.model[name].requires_grad}
        return Loss(factors, reached, bad) if reached else None

    def _pick(self, which: int) -> tuple[int, str]:
        place = which % len(self.opts)
        return place, self.opts[place]

    def _key(self, place: int, loss_id: str) -> Key:
        group = self.groups[place]
        return (group, loss_id, self.generations[group])

    def _scaled(self, place: int, loss: Loss) -> None:
        """Note that a loss was scaled: if it is not finite, its optimizers may skip."""
        for other, opt in enumerate(self.opts):
            is_reached = not loss.reached.isdisjoint(self.owned[other])
            tests = is_reached and not self.model[opt].checks  # then the other optimizer's scale does
            shares = self.groups[other] == self.groups[place]
            if tests or (loss.is_bad and (is_reached or shares)):
                self.model[opt].may_skip = True
        if loss.reached.isdisjoint(set().union(*self.owned)):
            self.elsewhere.add(place)

    def _found(self, place: int, loss: Loss, reached: set[str]) -> None:
        """Note that the backward pass of a loss reached parameters: if the loss was not finite, their steps skip."""
        self.seen |= {*range(len(self.opts))}
        for opt, owned in zip(self.opts, self.owned, strict=True):
            tests = self.model[opt].checks and self.model[self.opts[place]].checks
            self.model[opt].must_skip |= loss.is_bad and tests and not reached.isdisjoint(owned)

    def _arrive(self, names: set[str], key: Key) -> None:
        """Note that gradients were added to."""
        self.clippable.clear()
        for owned in [*self.owned, [self.names[-1]]]:
            if any(ODD in self.sources[name] for name in owned):
                for name in names.intersection(owned):
                    self.sources[name].add(ODD)
        for name in names:
            self.sources[name].add(key)
        for place, owned in enumerate(self.owned):
            if not names.isdisjoint(owned):
                self.unscaled.discard(place)

    def _has_gradients(self, place: int) -> bool:
        return any(self.model[name].grad is not None for name in self.owned[place])

    def _is_plain(self, place: int, arriving: set[str] = frozenset(), key: Key = ODD) -> bool:  # type: ignore[assignment]
        """Return whether gradients are of losses that the optimizer or its partners scaled, or of one other loss."""
        keys = set().union(*(self.sources[name] for name in self.owned[place]))
        keys |= set() if arriving.isdisjoint(self.owned[place]) else {key}
        if ODD in keys or not keys or any(self._owners(name) > 1 for name in self.owned[place]):
            return False
        own = all(group == self.groups[place] for group, _, _ in keys)  # type: ignore[misc]
        return len({(group, turn) for group, _, turn in keys}) <= 1 and (own or len(keys) == 1)  # type: ignore[misc]

    def _owners(self, name: str) -> int:
        return sum(name in owned for owned in self.owned)

    def _may_arrive(self, reached: set[str], key: Key) -> bool:
        """Return whether a backward pass must not be refused."""
        owners = [place for place, names in enumerate(self.owned) if not reached.isdisjoint(names)]
        return all(self._is_plain(place, reached, key) for place in owners)

    def _legal(self, place: int) -> bool:
        """Return whether a step must not be refused."""
        return self._is_plain(place) if self._has_gradients(place) else place in self.seen

    def _forget(self, names: list[str]) -> None:
        for name in names:
            self.sources[name] = set()

    def _clear_all(self) -> None:
        for place in range(len(self.opts)):
            self._run(f"{self.opts[place]}.zero_grad()")
            self._clear(place)
        self._run(f"{self.names[-1]}.grad = None")
        self._forget(self.names)

    def _clear(self, place: int) -> None:
        self._forget(self.owned[place])
        self.looked.discard(place)
        self.unscaled.discard(place)

    # --- backward passes ----------------------------------------------------------------------------------------------

    @rule(
        which=WHICH, terms=TERMS, bad=BAD, loss_id=LOSS_IDS,
        form=st.sampled_from(["backward", "backward", "scale", "vector", "inputs", "twice", "list", "grad"]),
    )  # fmt: skip
    def backward(self, which: int, terms: Any, bad: str, loss_id: str, form: str) -> None:
        place, opt = self._pick(which)
        loss = self._loss(terms, bad)
        if loss is None:
            return
        name, reached, key = sorted(loss.reached)[0], loss.reached, self._key(place, loss_id)
        lines = {
            "backward": f"{opt}.backward({loss.text}{loss_id})",
            "scale": f"{opt}.scale({loss.text}{loss_id}).backward()",
            "vector": f"{opt}.backward(torch.stack([{', '.join(loss.parts)}]){bad}{loss_id}, "
            f"gradient=torch.ones({len(loss.parts)}))",
            "inputs": f"{opt}.backward({loss.text}{loss_id}, inputs=[{name}])",
            "twice": f"l = {opt}.scale({loss.text}{loss_id}); l.backward(retain_graph=True); l.backward()",
            "list": f"torch.autograd.backward({opt}.scale([{', '.join(part + bad for part in loss.parts)}]{loss_id}))",
            "grad": f"{name}.grad = torch.autograd.grad({opt}.scale({loss.text}{loss_id}), {name})[0].clone()",
        }
        if form == "list" and any(part.rpartition("(")[2][:-1] not in reached for part in loss.parts):
            return  # one of the losses has no graph
        if form == "inputs" or form == "grad":
            reached = {name}
        if form == "grad":  # beside gradients of another scale it would have to be declared
            if self.model[name].grad is not None or any(self.sources[one] - {key} for one in self.names):
                return
            self.sources[name] = {ODD}
        stale = any(ODD in self.sources[own] for own in self.owned[place])  # then opt.backward is refused
        legal = self._may_arrive(reached, key) and not (stale and lines[form].startswith(f"{opt}.backward"))
        if self._run(lines[form], legal=legal, backward=True):
            self._scaled(place, loss)
            self._arrive(reached, key)
            if form != "grad":
                self._found(place, loss, reached)

    @precondition(lambda self: len(self.pending) < 4)
    @rule(which=WHICH, terms=TERMS, bad=BAD, loss_id=LOSS_IDS)
    def scale(self, which: int, terms: Any, bad: str, loss_id: str) -> None:
        place, opt = self._pick(which)
        loss = self._loss(terms, bad)
        if loss is not None:
            self.count += 1
            if self._run(f"l{self.count} = {opt}.scale({loss.text}{loss_id})"):
                self.pending[f"l{self.count}"] = loss, self._key(place, loss_id), place
                self._scaled(place, loss)

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, 3), again=st.sampled_from(["", "", "retain_graph=True"]))
    def backward_of_a_scaled_loss(self, which: int, again: str) -> None:
        name = [*self.pending][which % len(self.pending)]
        loss, key, place = self.pending[name] if again else self.pending.pop(name)
        if self._run(f"{name}.backward({again})", legal=self._may_arrive(loss.reached, key), backward=True):
            self._scaled(place, loss)
            self._arrive(loss.reached, key)
            self._found(place, loss, loss.reached)

    @precondition(lambda self: len(self.pending) > 1)
    @rule(as_list=st.booleans())
    def backward_of_two_scaled_losses(self, as_list: bool) -> None:
        (one, (loss, key, place)), (two, (other, other_key, other_place)) = list(self.pending.items())[:2]
        del self.pending[one], self.pending[two]
        line = f"torch.autograd.backward([{one}, {two}])" if as_list else f"({one} + {two}).backward()"
        reached = loss.reached | other.reached
        legal = key == other_key and self._may_arrive(reached, key)
        if self._run(line, legal=legal, backward=True):
            self._scaled(place, loss)
            self._scaled(other_place, other)
            self._arrive(reached, key if key == other_key else ODD)
            self._found(place, loss, loss.reached)
            self._found(other_place, other, other.reached)

    @rule(
        which=WHICH, terms=TERMS, others=TERMS,
        form=st.sampled_from(["({1}).backward()", "({0} + {1}).backward()", "torch.autograd.backward([{0}, {1}])"]),
    )  # fmt: skip
    def backward_of_an_unscaled_loss(self, which: int, terms: Any, others: Any, form: str) -> None:
        _, opt = self._pick(which)
        scaled, loss = self._loss(terms), self._loss(others)
        if scaled is None or loss is None:
            return
        # After a loss that reached only others, such as representations, an unscaled one is taken as its continuation.
        if not any(loss.reached.intersection(self.owned[place]) for place in self.elsewhere):
            line = form.format(f"{opt}.scale({scaled.text})", loss.text)
            if self._run(line, legal=form.startswith("({1})"), backward=True):
                self._arrive(loss.reached | (scaled.reached if "{0}" in form else set()), ODD)

    more_often = backward

    # --- steps --------------------------------------------------------------------------------------------------------

    @rule(which=WHICH, gives_up=st.booleans())
    def step(self, which: int, gives_up: bool) -> None:
        place, opt = self._pick(which)
        if not self._step(place, f"{opt}.step()", legal=self._legal(place)) and gives_up:
            self._clear_all()

    @rule(which=WHICH, terms=TERMS, bad=BAD)
    def train(self, which: int, terms: Any, bad: str) -> None:
        place, opt = self._pick(which)
        loss = self._loss(terms, bad)
        if loss is not None:
            self._run(f"{opt}.zero_grad()")
            self._clear(place)
            key = self._key(place, "")
            if self._run(f"{opt}.backward({loss.text})", legal=self._may_arrive(loss.reached, key), backward=True):
                self._scaled(place, loss)
                self._arrive(loss.reached, key)
                self._found(place, loss, loss.reached)
                self._step(place, f"{opt}.step()", legal=self._legal(place))

    @rule(which=WHICH, terms=TERMS)
    def step_with_a_closure(self, which: int, terms: Any) -> None:
        place, opt = self._pick(which)
        loss = self._loss(terms)
        if loss is not None:
            self._clear(place)
            key = self._key(place, "")
            legal = self._may_arrive(loss.reached, key) and not loss.reached.isdisjoint(self.owned[place])
            self._arrive(loss.reached, key)
            self.seen |= {*range(len(self.opts))}
            body = f"{opt}.zero_grad(); loss = {loss.text}; {opt}.backward(loss); return loss"
            self._run(f"def closure(): {body}")
            if not self._step(place, f"{opt}.step(closure)", legal=legal, backward=True):
                self._clear_all()

    @rule(which=WHICH, scaled=st.booleans(), value=st.sampled_from([1.0, 2.0, 1.0, float("inf")]))
    def step_on_gradients_by_hand(self, which: int, scaled: bool, value: float) -> None:
        place, opt = self._pick(which)
        self._run(f"{opt}.zero_grad()")
        self._clear(place)
        factor = f"{value} * {opt}.loss_scale" if scaled else value
        self._run(f"for p in [{', '.join(self.owned[place])}]: p.grad = torch.full_like(p, {factor})")
        self._forget(self.owned[place])
        tied = any(self._owners(name) > 1 for name in self.owned[place])
        self._step(place, f"{opt}.step(scaled={scaled})", legal=not tied)

    def _step(self, place: int, line: str, *, legal: bool, backward: bool = False) -> bool:
        opt, before = self.opts[place], self._bits()
        keys = set().union(*(self.sources[name] for name in self.owned[place]))
        if ODD in keys and self.has_masters and (self.clips or not self.model[opt].checks):
            return True  # what clipped the masters' gradients did not clip the model's, and it may not be refused
        if ODD in keys and not self.model[opt].checks:
            self.model[opt].may_skip = True  # if another optimizer's scale made them
        group = self.groups[place]
        exact = len(self.opts) == 1 and legal and keys == {self._key(place, "")}
        model = self.model[opt]
        tested = backward or self._has_gradients(place) or model.must_skip or model.may_skip or place in self.unscaled
        config: LossScale = self.configs[0 if self.groups == [0] * len(self.opts) else place]
        state = _scale_state(self.ours[opt])
        if not self._run(line, legal=legal, backward=backward):
            return False
        applied = bool(self.ours[opt].last_step.applied)
        if self._has_gradients(place):
            expected = self.model[opt].applied
            self._check(applied == expected, f"{opt} was {'stepped' if applied else 'skipped'}")
        if not applied:
            after = self._bits()
            self._check(after["params"] == before["params"], "a skipped step changed parameters")
            self._check(after["states"][place] == before["states"][place], "a skipped step changed the state")
        if exact and config.check:
            now = _scale_state(self.ours[opt])
            self._check(now == polyamp.advance(config, state, applied), f"the loss scale went from {state} to {now}")
        if not tested and legal:
            self._check(_scale_state(self.ours[opt]) == state, "a step without gradients advanced the loss scale")
        self._compare(place, applied)
        self.generations[group] += 1
        self.unscaled.discard(place)
        self.elsewhere.discard(place)
        self.seen.discard(place)
        self.looked.discard(place)
        for name in self.owned[place]:
            self.sources[name] = {ODD} if self.model[name].grad is not None else set()
        return True

    def _compare(self, place: int, applied: bool) -> None:
        for name in self.names:
            found, expected = self.ours[name], self.model[name]
            self._check(
                same(found, expected), f"{name} is {found.tolist()}, and without scaling it is {expected.tolist()}"
            )
        for name, master in zip(self.owned[place], trained(self.ours[self.opts[place]]), strict=True):
            param, rounded = self.ours[name].detach(), master.detach().to(self.ours[name].dtype)
            is_rounded = bits(rounded.nan_to_num()) == bits(param.nan_to_num())
            self._check(not applied or is_rounded, f"{name} is not its rounded master")

    step_more_often, train_more_often = step, train

    # --- unscaling and clipping ---------------------------------------------------------------------------------------

    @rule(which=WHICH, form=st.sampled_from(["unscale_()", "clip_grad_norm_(1.0)"]))
    def unscale(self, which: int, form: str) -> None:
        place, opt = self._pick(which)
        legal = self._legal(place) and (place not in self.unscaled or form != "unscale_()")
        if self._run(f"{opt}.{form}", legal=legal):
            self.unscaled.add(place)
            self.clippable.add(place)

    @rule(which=WHICH)
    def clip_by_torch(self, which: int) -> None:
        place, opt = self._pick(which)
        legal = place in self.unscaled & self.clippable and self._legal(place)
        if self._has_gradients(place):
            self._run(f"torch.nn.utils.clip_grad_norm_(trained({opt}), 1.0)", legal=legal)

    @rule(which=WHICH, place=st.integers(0, 2), change=st.sampled_from([".mul_(0.5)", "[0] = inf", "[1] = inf - inf"]))
    def change_a_gradient(self, which: int, place: int, change: str) -> None:
        owner, opt = self._pick(which)
        place %= len(self.owned[owner])
        name = self.owned[owner][place]
        held = f"trained({opt})[{place}]" if owner in self.unscaled else name
        grads = [eval(f"{held}.grad", side) for side in (self.ours, self.model)]
        mixed = len(self.sources[name]) > 1
        if all(grad is not None for grad in grads) and not (mixed and "mul" in change):
            self._run(f"{held}.grad{change}")
            self._touch(owner)
            self.sources[name] = self.sources[name] or {ODD}  # of one that was set to zeros, the gradient is new
            if "inf" in change:  # after clearing by hand both a step and a skip are right
                for other, names in enumerate(self.owned):
                    self.model[self.opts[other]].may_skip |= name in names

    @rule(which=WHICH, place=st.integers(0, 2), value=st.sampled_from(["0.0, 0.0, 0.0", "0.5, 0.5, 0.5"]))
    def clean_a_gradient(self, which: int, place: int, value: str) -> None:
        owner, opt = self._pick(which)
        name = self.owned[owner][place % len(self.owned[owner])]
        unscaled = owner in self.unscaled
        held = f"trained({opt})[{place % len(self.owned[owner])}]" if unscaled else name
        is_kept = unscaled or self.model[name].grad is None or bool(self.model[name].grad.isfinite().all())
        if is_kept or value.startswith("0.0"):  # else it would be multiplied by another scale
            self._run(f"{held}.grad is None or {held}.grad.nan_to_num_({value})")
            self._touch(owner)

    @rule(which=WHICH)
    def clip_by_value(self, which: int) -> None:
        place, opt = self._pick(which)
        legal = place in self.unscaled & self.clippable and self._legal(place)
        if self._has_gradients(place) and place in self.unscaled:
            self._run(f"torch.nn.utils.clip_grad_value_(trained({opt}), 0.5)", legal=legal)

    @rule(place=st.integers(0, 6), form=st.sampled_from(["{0}.grad.detach().clone()", "{0}.grad.clone()"]))
    def replace_a_gradient(self, place: int, form: str) -> None:
        name = self.names[place % len(self.names)]
        if ODD in self.sources[name]:
            return  # nothing shows that a new tensor holds what the last step left
        if self.model[name].grad is not None and not any(name in self.owned[place] for place in self.unscaled):
            self._run(f"{name}.grad = {form.format(name)}")
            for owner, owned in enumerate(self.owned):
                if name in owned:
                    self._touch(owner)

    def _touch(self, owner: int) -> None:
        """Note a write to gradients, which may have added those that `torch.autograd.grad` returned before."""
        for name in self.owned[owner] if owner in self.looked else ():
            self.sources[name] |= {ODD} if self.sources[name] else set()

    @rule(
        which=WHICH, place=st.integers(0, 2), terms=TERMS, loss_id=LOSS_IDS, early=st.booleans(), masters=st.booleans(),
        form=st.sampled_from(["", "{0}.grad = g", "{0}.grad += g", "{0}.grad = {0}.grad + g"]),
    )  # fmt: skip
    def add_by_hand(
        self, which: int, place: int, terms: Any, loss_id: str, early: bool, masters: bool, form: str
    ) -> None:
        owner, opt = self._pick(which)
        place %= len(self.owned[owner])
        name, loss = self.owned[owner][place], self._loss(terms)
        if (
            loss is None
            or name not in loss.reached
            or not self._run(
                f"g = torch.autograd.grad({opt}.scale({loss.text}{loss_id}), {name})[0].clone()", backward=True
            )
        ):
            return
        self._scaled(owner, loss)
        self.seen |= {*range(len(self.opts))}
        for other, owned in enumerate(self.owned):
            if name in owned:
                self.looked.add(other)
        if early and form and self._legal(owner) and owner not in self.unscaled and self._run(f"{opt}.unscale_()"):
            self.unscaled.add(owner)
            self.clippable.add(owner)
        held = f"trained({opt})[{place}]" if masters and owner in self.unscaled else name
        if ODD in self.sources[name] and form.endswith("+ g"):
            return  # as in `replace_a_gradient`
        if form and eval(f"{held}.grad is not None", self.ours) and self.model[name].grad is not None:
            self._run(f"{form.format(held)}.to({held}.dtype)")
            self.clippable.clear()
            for owned in self.owned:
                for one in owned if name in owned else ():
                    self.sources[one] |= {ODD} if self.sources[one] or one == name else set()

    @rule(which=WHICH, terms=TERMS)
    def cache_representations(self, which: int, terms: Any) -> None:
        place, opt = self._pick(which)
        loss = self._loss(terms)
        if loss is None or loss.reached - {*self.owned[place]}:
            return
        parts = [part for part in loss.parts if part.rpartition("(")[2][:-1] in loss.reached]
        line = f"h = torch.ones((), requires_grad=True); {opt}.backward(h)"
        line += "".join(f"; ({part}).backward(h.grad)" for part in parts)
        if self._run(line, legal=False, backward=True):
            self._arrive(loss.reached, ODD)
            self.seen |= {*range(len(self.opts))}
            self.elsewhere.add(place)

    # --- clearing -----------------------------------------------------------------------------------------------------

    @rule(
        which=WHICH,
        form=st.sampled_from([
            "{0}.zero_grad()", "{0}.zero_grad(set_to_none=False)", "torch.nn.ParameterList([{1}]).zero_grad()",
            "torch.nn.ParameterList([{1}]).zero_grad(set_to_none=False)", "for p in [{1}]: p.grad = None",
            "for p in [{1}]: p.grad is None or p.grad.zero_()",
            "for p in [{1}]: p.grad is None or p.grad.detach_().zero_()",
        ]),
    )  # fmt: skip
    def clear(self, which: int, form: str) -> None:
        place, opt = self._pick(which)
        self._run(form.format(opt, ", ".join(self.owned[place])))
        self._clear(place)
        if form.startswith("{0}"):
            self.model[opt].may_skip = False
            self.elsewhere.discard(place)

    @rule(place=st.integers(0, 6), form=st.sampled_from(["{0}.grad = None", "{0}.grad is None or {0}.grad.zero_()"]))
    def clear_one_gradient(self, place: int, form: str) -> None:
        name = self.names[place % len(self.names)]
        self._run(form.format(name))
        for owned in self.owned:  # of a pass that no factor is right for, the rest may have a part
            if name in owned and ODD in self.sources[name]:
                for other in owned:
                    self.sources[other] |= {ODD} if self.sources[other] else set()
        self._forget([name])

    # --- parameters and state -----------------------------------------------------------------------------------------

    @rule(
        place=st.integers(0, 6),
        form=st.sampled_from([
            "with torch.no_grad(): {0}.mul_(0.5)", "{0}.data.clamp_(-0.25, 0.25)", "{0}.data.mul_(0.5)",
            "with torch.no_grad(): {0}.copy_(torch.tensor([0.5, -0.5]))", "{0}.data.copy_(torch.tensor([2.0, 1.0]))",
        ]),
    )  # fmt: skip
    def write(self, place: int, form: str) -> None:
        self._run(form.format(self.names[place % len(self.names)]))

    @precondition(lambda self: not self.pending)  # else plain PyTorch has no gradient for what is frozen in between
    @rule(place=st.integers(0, 6), on=st.booleans())
    def freeze(self, place: int, on: bool) -> None:
        self._run(f"{self.names[place % len(self.names)]}.requires_grad_({not on})")

    @rule(
        place=st.integers(0, 6),
        form=st.sampled_from([
            "{0}.register_hook(lambda grad: 2 * grad)",
            "{0}.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])",
        ]),
    )  # fmt: skip
    def hook(self, place: int, form: str) -> None:
        name = self.names[place % len(self.names)]
        if name not in self.hooked and self.model[name].requires_grad:
            self.hooked.add(name)
            self._run(form.format(name))

    @precondition(lambda self: not any(self.names[-1] in names for names in self.owned))
    @rule(which=WHICH)
    def add_a_group(self, which: int) -> None:
        place, opt = self._pick(which)
        self._run(f'{opt}.add_param_group({{"params": [{self.names[-1]}]}})')
        self.owned[place].append(self.names[-1])
        if self.sources[self.names[-1]]:
            self.sources[self.names[-1]].add(ODD)

    @rule(which=WHICH)
    def reload(self, which: int) -> None:
        _, opt = self._pick(which)
        self._run(f"{opt}.load_state_dict({opt}.state_dict())")

    @rule(which=WHICH, load=st.booleans())
    def save_or_load(self, which: int, load: bool) -> None:
        place, opt = self._pick(which)
        names = list(self.owned[place])
        if not load:
            self._run(f"s{place} = deepcopy(({opt}.state_dict(), [p.detach() for p in [{', '.join(names)}]]))")
            self.saved[place] = names
        elif self.saved.get(place) == names:
            self._run(f"{opt}.load_state_dict(s{place}[0])")
            self._run(f"for p, saved in zip([{', '.join(names)}], s{place}[1]): p.data.copy_(saved)")
            self.generations[self.groups[place]] += 1

    @rule(really=st.sampled_from([False, False, False, True]))
    def copy(self, really: bool) -> None:
        if not really:
            return
        everything = self._all([*self.names, *self.opts])
        self._run(f"{everything} = deepcopy(({everything}))")
        self._forget(self.names)  # a copied parameter has no gradient
        self.pending = {}
        for some in (self.unscaled, self.hooked, self.looked, self.seen):
            some.clear()
        for name in self.opts:
            self.model[name].must_skip = False

    @rule(which=WHICH, scale=st.sampled_from([1.0, 4.0, 32.0]))
    def set_the_scale(self, which: int, scale: float) -> None:
        place, opt = self._pick(which)
        if self._run(f"{opt}.loss_scale = {scale}", legal=False):
            self.generations[self.groups[place]] += 1


def _scale_state(opt: Any) -> LossScaleState:
    saved = polyamp.save_loss_scale(opt)
    return LossScaleState(*(saved[field] for field in LossScaleState._fields))


def _list(names: list[str]) -> str:
    return f"[{', '.join(names)}]"


def _state(opt: Any) -> list[Any]:
    return [bits(dict(opt.state.get(param, {}))) for param in trained(opt)]


Steps.TestCase.settings = settings(stateful_step_count=40, report_multiple_bugs=False, derandomize=True)
TestSteps = Steps.TestCase


@pytest.mark.long
def test_three_thousand_programs() -> None:
    run_state_machine_as_test(Steps, settings=settings(max_examples=3000, stateful_step_count=40))  # type: ignore[no-untyped-call]
