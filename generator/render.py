"""Spec -> CUDA C++: a pure function. Templates come only from the package's folders.

Every token substituted into a template outside of included text is checked against a strict
pattern, so that nothing that came from a YAML file can inject code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

import jinja2
import jinja2.ext
import jinja2.runtime
from jinja2 import nodes
from jinja2.parser import Parser

from warploom import templates
from warploom.generator.families import family
from warploom.generator.specification import KernelSpec
from warploom.generator.wgmma import TemplateText

_TOKEN = re.compile(r"[A-Za-z0-9_:<>,.\[\](){}*/=+#;&% -]*")
_MAX_TOKEN = 300
_BLANKS = re.compile(r"\n{3,}")  # where parts leave out what is between them
_BLANK_INSIDE = re.compile(r"(?<=\{\n)\n|\n(?=\n *\})")
_PLACE = re.compile(r"^\{# (\w+) #\}\n", re.M)


def _checked(value: object) -> str:
    """Turn a substituted value into text, or fail when it could be more than a token."""
    if isinstance(value, TemplateText):
        return value
    text = str(value)
    if len(text) > _MAX_TOKEN or not _TOKEN.fullmatch(text):
        raise ValueError(f"template token {text[:80]!r}: is not a plain token")
    return text


class _Loader(jinja2.FileSystemLoader):
    """Templates of folders, and places in them: `file#place` is what follows `{# place #}`.

    `file.cuh` is also found as `file.cuh.jinja`: of parts that are chosen by name some hold Jinja.
    """

    def __init__(self, folders: tuple[str, ...]) -> None:
        super().__init__(folders)
        self._places: dict[str, dict[str, str]] = {}  # of each file, the text of each

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        file, _, place = template.partition("#")
        try:
            source, path, current = super().get_source(environment, file)
        except jinja2.TemplateNotFound:
            source, path, current = super().get_source(environment, f"{file}.jinja")
        if place:
            if place not in self.places(environment, file):
                raise jinja2.TemplateNotFound(template)
            source = self.places(environment, file)[place]
        return source, path, current

    def places(self, environment: jinja2.Environment, file: str) -> dict[str, str]:
        """Return what a file has for each place; nothing where there is no such file."""
        if file not in self._places:
            try:
                source, *_ = super().get_source(environment, file)
            except jinja2.TemplateNotFound:
                source = ""
            _, *named = _PLACE.split(source)
            self._places[file] = dict(zip(named[::2], named[1::2], strict=True))
        return self._places[file]


class _Hook(jinja2.ext.Extension):
    """What each file of `parts`, the kernel's options, has for a place: lines, or words in a line.

    `{% hook "place" %}` are lines. `{{ hook("place", "default") }}` is what the files have without
    the last line's end; the default where none has the place.
    """

    tags = {"hook"}  # noqa: RUF012 (as jinja2 declares it)

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        environment.globals["hook"] = self._words

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a loop over the files of `parts` that have the place, which includes it."""
        line = next(parser.stream).lineno
        place = parser.parse_expression()
        found = self.call_method("_found", [nodes.Name("parts", "load"), place])
        include = nodes.Include(nodes.Name("file", "load"), True, False)
        return nodes.For(
            nodes.Name("file", "store"), found, [include], [], None, False, lineno=line
        )

    @jinja2.pass_context
    def _words(
        self, context: jinja2.runtime.Context, place: str, default: str = ""
    ) -> TemplateText:
        files = self._found(context["parts"], place)
        found = [self.environment.get_template(file).render(context.get_all()) for file in files]
        return TemplateText(
            "".join(text.removesuffix("\n") for text in found) if files else default
        )

    def _found(self, parts: Sequence[str], place: str) -> list[str]:
        loader = cast(_Loader, self.environment.loader)
        having = [part for part in parts if place in loader.places(self.environment, part)]
        return [f"{part}#{place}" for part in having]


@cache
def _environment(folders: tuple[str, ...]) -> jinja2.Environment:
    """A strict Jinja environment that knows the templates of these folders only."""
    return jinja2.Environment(
        loader=_Loader(folders),
        undefined=jinja2.StrictUndefined,
        extensions=[_Hook],
        autoescape=False,  # noqa: S701 (the output is C++; tokens are checked instead)
        finalize=_checked,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        cache_size=-1,  # there are a thousand, with the places in them
        auto_reload=False,  # nor is each file looked at again for each kernel
    )


def render(spec: KernelSpec) -> str:
    """Return the translation unit of `spec`, a complete .cu file.

    The template has the spec, its parts, layout and parameters, and what its family adds.
    """
    described = family(spec.operation.family)
    environment = _environment(tuple(templates.__path__))
    template = environment.get_template(f"{described.name}/kernel.cu.jinja")
    text = template.render(
        spec=spec,
        operation=spec.operation,
        schedule=spec.schedule,
        layout=described.layout(spec),
        parameters=described.parameters(spec),
        **described.context(spec),
    )
    return _BLANK_INSIDE.sub("", _BLANKS.sub("\n\n", text))
