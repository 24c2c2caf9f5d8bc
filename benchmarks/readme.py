"""`python -m benchmarks.readme --write README.md`: what the README shows, drawn from what is there.

The picture, the table and the losses are those of results/*.json, the lines of a kernel are as the
templates render them, and the output is what the README's own program prints. Tests hold it to
this.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import click

from benchmarks.report import MEANS, documents, grids, image, rows, summary_picture
from benchmarks.tables import summaries
from benchmarks.wording import DocumentJson, by_kind, losses
from warploom.atomic_file import replace_file
from warploom.generator.markdown import insert
from warploom.generator.render import render
from warploom.generator.space import expand_file
from warploom.generator.specification import parse_name

ROOT = Path(__file__).parents[1]
_LOOP = re.compile(r"^  for \(int tile = cluster;.*?^  }$", re.MULTILINE | re.DOTALL)
_WORST = 3  # subjects of each kind whose losses the README names


def renewed(text: str) -> str:
    """The README with its picture, table, losses, kernel and output as they should be."""
    listed = documents()
    shown = image(summary_picture(listed), "docs/pictures")
    line = re.compile(rf"^!\[.*\]\(.*/{MEANS}\.svg\)$", re.MULTILINE)
    text = line.sub(lambda _: shown, text)
    text = insert(text, "measured", summaries(rows(listed)))
    text = insert(text, "losses", _losses(grids(listed)))
    return _in_block(_in_block(text, "cpp", excerpt(kernel(text))), "text", printed(text))


def _in_block(text: str, language: str, content: str) -> str:
    """`text` with the contents of its one code block of a language replaced."""
    block = re.compile(rf"^```{language}\n.*?^```$", re.MULTILINE | re.DOTALL)
    return block.sub(lambda _: f"```{language}\n{content}\n```", text)


def _losses(documents: Sequence[DocumentJson]) -> str:
    """What Warploom loses, the worst of each kind."""
    lines = []
    kinds = by_kind(cell for document in documents for cell in document["cells"])
    for kind, cells in kinds.items():
        if told := losses(cells, _WORST):
            lines.append(f"- {kind}: {'; '.join(told)}")
    return "\n".join(lines)


def kernel(text: str) -> str:
    """The name of the kernel that the README's configuration is of."""
    (configuration,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "readme.yaml"
        file.write_text(configuration)
        (spec,) = expand_file(file).specs
    return spec.name


def excerpt(name: str) -> str:
    """The producer's loop of a kernel, as it is emitted but for the indentation."""
    loop = _LOOP.search(render(parse_name(name)))
    if loop is None:
        raise ValueError(f"{name}: no loop over tiles")
    return dedent(loop.group())


def printed(text: str) -> str:
    """What the Python block of a README prints, without a GPU, compiled kernels or own records."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    inherited = {name: x for name, x in os.environ.items() if not name.startswith("WARPLOOM_")}
    with tempfile.TemporaryDirectory() as empty:
        own = {name: f"{empty}/{name}" for name in ("WARPLOOM_CACHE_DIR", "WARPLOOM_RECORDS_DIR")}
        done = subprocess.run(  # noqa: S603 (this repository's own program)
            [sys.executable, "-c", program],
            env={**inherited, **own, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise ValueError(f"the README's program fails: {done.stderr}")
    return done.stdout.strip()


@click.command()
@click.option("--write", "path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def main(path: Path | None) -> None:
    """Renew the marked parts of the README, or print it renewed."""
    text = renewed((path or ROOT / "README.md").read_text())
    if path:
        replace_file(path, text)
    else:
        click.echo(text)


if __name__ == "__main__":
    main()
