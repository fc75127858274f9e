"""Runs the notebooks and writes them back in the form in which they are kept.

    python notebooks/refresh.py [--to FOLDER] [--timeout SECONDS] [NAME ...]

A NAME is that of a notebook here, without its ending; without one, all are run. Each
runs top to bottom in a fresh kernel on this machine's default device, in an empty
folder and without downloads. An error in a cell is an error here.

Kept are the text, the reports and the small pictures that a reader sees. Dropped is
what differs between two runs or two machines for no reason: execution counts and times,
what went to stderr, the kernel's version. Kept is the version of JAX that made them. A
cell's id is the hash of its source. Cells with the tag `times` print times, those with
`varies` what depends on the machine: tests compare all others. It needs nbclient,
nbformat and ipykernel: pip install -e '.[tests]'.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata
import io
import os
import pathlib
import sys
import tempfile
from typing import Any

import nbclient
import nbformat
from PIL import Image  # matplotlib brings it

HERE = pathlib.Path(__file__).resolve().parent
NAMES = ("quickstart", "float16_and_loss_scaling", "how_it_works")

# What Colab reads: which run-time to offer.
_METADATA = ("accelerator", "colab")
# A cell's tags, and whether Colab and Jupyter fold its code.
_CELL = ("tags", "cellView", "jupyter")
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
_PICTURE_BYTES, _COLORS = 60_000, 64


def read(name: str, folder: pathlib.Path = HERE) -> Any:
    """Reads a notebook as it is."""
    return nbformat.read(folder / f"{name}.ipynb", as_version=4)


def write(notebook: Any, name: str, folder: pathlib.Path = HERE) -> None:
    """Writes a notebook."""
    nbformat.write(notebook, folder / f"{name}.ipynb")


def execute(notebook: Any, timeout: float = 600) -> Any:
    """Runs a copy in a fresh kernel, which sees this checkout's package.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.from_dict(notebook)
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.getenv("PYTHONPATH")]))
    environment = os.environ | {"JMP_REWRITE_OFFLINE": "1", "PYTHONPATH": path}
    environment.pop("MPLBACKEND", None)  # the kernel's own shows pictures
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            store_widget_state=False,
            record_timing=False,
        ).execute(env=environment)
    return notebook


def normal(notebook: Any) -> Any:
    """Returns a copy in the form in which notebooks are kept."""
    notebook = nbformat.from_dict(notebook)
    kept = {k: notebook.metadata[k] for k in _METADATA if k in notebook.metadata}
    jax = {"jax": ".".join(importlib.metadata.version("jax").split(".")[:2])}
    notebook.metadata = nbformat.from_dict({**kept, **jax, "kernelspec": _KERNEL})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in notebook.cells:
        cell.id = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        kept = {k: cell.metadata[k] for k in _CELL if k in cell.metadata}
        cell.metadata = nbformat.from_dict(kept)
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = _outputs(cell.outputs)
    return notebook


def _outputs(outputs: list[Any]) -> list[Any]:
    kept: list[Any] = []
    for output in outputs:
        if output.output_type == "stream":
            if output.name == "stderr":
                continue
            text = _as_shown(output.text)
            if kept and kept[-1].output_type == "stream":
                kept[-1].text += text
            else:
                kept.append(nbformat.v4.new_output("stream", name="stdout", text=text))
        elif output.output_type == "error":
            kept.append(output)
        else:
            kept.append(_shown(output))
    return kept


def _as_shown(text: str) -> str:
    """Returns what is left of each line after its carriage returns."""
    lines = text.split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def _shown(output: Any) -> Any:
    kinds = ("text/plain", "text/html", "image/png")
    data = {k: v for k, v in output.data.items() if k in kinds}
    if "text/plain" in data:  # what a reader sees is the picture or the page beside it
        data["text/plain"] = data["text/plain"].partition(" at 0x")[0]
    if "image/png" in data:
        data["image/png"] = _small(data["image/png"])
    return nbformat.v4.new_output(output.output_type, data=data)


def _small(picture: str) -> str:
    """Returns a picture with few colors: a third of the bytes."""
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    if image.mode != "P":
        small = io.BytesIO()
        image.convert("RGB").quantize(_COLORS).save(small, "PNG", optimize=True)
        picture = base64.b64encode(small.getvalue()).decode()
    if len(picture) > _PICTURE_BYTES:
        raise ValueError(
            f"expected pictures of at most {_PICTURE_BYTES:,} bytes, got "
            f"{len(picture):,}: draw it smaller, or with fewer dots an inch"
        )
    return picture


def _warnings(notebook: Any) -> list[str]:
    """What a reader of a notebook that was run sees in red.

    What `diagnose` and `cost` are doing is said there too, where it takes longer than a
    moment; `cost` writes over its own line, with carriage returns.
    """
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    red = [o.text for o in outputs if o.get("name") == "stderr"]
    lines = [line for text in red for line in text.split("\n")]
    progress = ("diagnose: ", "\r")
    return [x for x in lines if x.strip() and not x.startswith(progress)]


def main(arguments: list[str] | None = None) -> None:
    """Runs notebooks and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="*", default=NAMES)
    parser.add_argument("--to", metavar="FOLDER", type=pathlib.Path, default=HERE)
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=600)
    options = parser.parse_args(arguments)
    for name in options.names:
        executed = execute(read(name), options.timeout)
        print(f"{name} ran")
        for line in _warnings(executed):
            print(f"{name}: a cell wrote to stderr: {line}", file=sys.stderr)
        write(normal(executed), name, options.to)


if __name__ == "__main__":
    main()
