"""Reads a drafter of any format, whichever it is."""

from pathlib import Path

from drafter_trainer.formats.drafter_format import CONFIG, DrafterFormat, PublishedDrafter, read_config
from drafter_trainer.formats.published_config import config_invalid
from drafter_trainer.formats.sglang import SglangFormat
from drafter_trainer.formats.vllm import VllmFormat
from drafter_trainer.formats.zlab import ZlabFormat

FORMATS: dict[str, DrafterFormat] = {one.name: one for one in (VllmFormat(), SglangFormat(), ZlabFormat())}


def format_of(directory: Path) -> DrafterFormat:
    """The format of a directory's `config.json`.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, there is none, or it is no DFlash drafter's.
    """
    values = read_config(directory)
    for one in FORMATS.values():
        if one.recognises(values):
            return one
    raise config_invalid(
        f"{directory / CONFIG} describes {values.get('architectures') or values.get('model_type')!r}, expected a "
        "DFlash drafter: speculators_model_type (vLLM) or dflash_config (SGLang, z-lab)"
    )


def read_published(directory: Path) -> PublishedDrafter:
    """Read and check.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID.
    """
    return format_of(directory).read(directory)
