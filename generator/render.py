"""Spec -> CUDA C++: a pure function. Templates come only from the package's folders.

Every token substituted into a template outside of included text is checked against a strict
pattern, so that nothing that came from a YAML file can inject code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import jinja2

from warploom import templates
from warploom.generator.families import family
from warploom.generator.specification import KernelSpec
from warploom.generator.wgmma import TemplateText

_TOKEN = re.compile(r"[A-Za-z0-9_:<>,.\[\](){}*/=+#;&% -]*")
_MAX_TOKEN = 300
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
    """Templates of folders, and places in them: `file#place` is what follows `{# place #}`."""

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        file, _, place = template.partition("#")
        source, path, current = super().get_source(environment, file)
        if place:
            _, *named = _PLACE.split(source)
            places = dict(zip(named[::2], named[1::2], strict=True))
            if place not in places:
                raise jinja2.TemplateNotFound(template)
            source = places[place]
        return source, path, current


@cache
def _environment(folders: tuple[str, ...]) -> jinja2.Environment:
    """A strict Jinja environment that knows the templates of these folders only."""
    return jinja2.Environment(
        loader=_Loader(folders),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 (the output is C++; tokens are checked instead)
        finalize=_checked,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(spec: KernelSpec) -> str:
    """Return the translation unit of `spec`, a complete .cu file.

    The template has the spec, its parts, layout and parameters, and what its family adds.
    """
    described = family(spec.operation.family)
    environment = _environment(tuple(templates.__path__))
    template = environment.get_template(f"{described.name}/kernel.cu.jinja")
    return template.render(
        spec=spec,
        operation=spec.operation,
        schedule=spec.schedule,
        layout=described.layout(spec),
        parameters=described.parameters(spec),
        **described.context(spec),
    )
