"""The steps of an epilogue as the C++ struct `Epilogue` has them: members, loads and calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from warploom.generator.epilogue import (
    GATES,
    EpilogueStep,
    MeanSquare,
    StochasticRounding,
    factors,
    gate_of,
)
from warploom.generator.families._product.launch import partial_name
from warploom.generator.families._product.layout import halved, held
from warploom.generator.families._product.schedule import ProductOperation, ProductSchedule
from warploom.generator.parameters import Kind

AT = "at, m, n"
"""A place in D, and the rows and columns that this has."""


@dataclass(frozen=True)
class StepText:
    """One step of an operation's epilogue in a schedule's kernel."""

    operation: ProductOperation
    schedule: ProductSchedule
    index: int

    @property
    def step(self) -> EpilogueStep:
        """What the operation declares."""
        return self.operation.epilogue[self.index]

    @property
    def cpp(self) -> str:
        """Its C++ class."""
        return self.step.cpp

    @property
    def auxiliary(self) -> bool:
        """Whether it has an output of its own."""
        return self.step.auxiliary

    @property
    def held(self) -> str:
        """For how long a thread holds what it reads, see `held`."""
        return held(self.step, self.schedule)

    @property
    def place(self) -> str:
        """Where it stands: `before` the gate, the `gate`, or `behind` it; without one, behind."""
        if isinstance(self.step, GATES):
            return "gate"
        return "before" if factors(self.operation.epilogue, self.index) > 1 else "behind"

    @property
    def partial(self) -> str:
        """The name of its partial sums; empty where it stores none."""
        return partial_name(self.operation, self.index) if self.step.partial else ""

    @property
    def member(self) -> str:
        """Its member of `Epilogue` with the arguments of its constructor."""
        return f"step_{self.index}{{{', '.join(self._arguments())}}}"

    def _arguments(self) -> list[str]:
        fields = self.step.fields(self.index)
        if self.partial:
            batch = f" + batch * p.{self.partial}_partial_batch" * self.operation.batched
            return [f"p.{self.partial}_partial{batch}"]
        apart = self.step.batch_field(self.index) if self.operation.batched else None
        batch = f" + batch * p.{apart.name}" if apart else ""
        pointers = sum(field.kind is Kind.POINTER for field in fields)
        return [
            f"p.{field.name}{batch * (number < pointers)}" for number, field in enumerate(fields)
        ]

    @property
    def _twice(self) -> bool:
        """Whether it is applied to the gate and to up apart."""
        return self.place == "before" and halved(self.operation, self.schedule)[1] == 2

    @property
    def operand(self) -> str:
        """The declaration of what it has loaded, for gate and for up where that differs."""
        each = "[2]" * (self.held == "fragment" and self._twice)
        return f"{self.cpp}::Operand step_{self.index}{each}"

    @property
    def loaded(self) -> str:
        """What it loads for a place in D."""
        load = f"step_{self.index}.load"
        if self.held == "fragment" and self._twice:
            first, second = (f"{load}(product_columns(at, n, {one}), m, n)" for one in (0, 1))
            return f"{{{first}, {second}}}"
        if self.place == "before" and self.schedule.swap_ab:
            return f"{load}(product_columns(at, n), m, n)"
        return f"{load}({AT}{' / 2' * (gate_of(self.operation.epilogue) is not None)})"

    def calls(self) -> Iterator[str]:
        """Yield its calls: one, or those for gate and for up."""
        apply = f"step_{self.index}.apply"
        if not self._twice:
            both = "of_product, " * (
                self.place == "gate" and halved(self.operation, self.schedule)[1] == 2
            )
            yield f"{apply}({both}x{self._applied_to('')})"
            return
        for one in ("0", "1"):
            operand = f"[{one}]" * (self.held == "fragment")
            yield f"{apply}(of_product[{one}]{self._applied_to(f', {one}')}{operand})"

    def of_chunk(self, chunk: str) -> list[str]:
        """Return its call where it takes the values of a whole chunk, the last before the store."""
        call = f"epilogue.step_{self.index}"
        if isinstance(self.step, StochasticRounding):
            return [f"{call}.round(x, at, {chunk})"]
        if isinstance(self.step, MeanSquare):
            return [f"{call}.add(x, at, {chunk}, p.m, p.n)"]
        return []

    def _applied_to(self, factor: str) -> str:
        """Return its arguments after the values; `factor`: of gate or up, if these differ."""
        gated = gate_of(self.operation.epilogue) is not None
        if self.held == "place" and gated and self.place == "behind":
            return f", {AT} / 2"
        if self.held == "place" and gated:
            return f", product_columns(at, n{factor}), m, n"
        if self.held == "fragment":
            return f", operands.step_{self.index}" + f", {AT}" * self.auxiliary
        return {
            "nothing": "",
            "block": f", block.step_{self.index}",
            "place": f", {AT}",
        }[self.held]
