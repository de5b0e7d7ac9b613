"""What every test shares: no hub, one thread, nothing measured unasked, a cache of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

# Set before anything imports a library that reads them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("SUBQUAD_TUNE", "off")  # "auto" measures where a test asks for it

# What its user has measured on a machine is nothing that a test may depend on.
os.environ["SUBQUAD_CACHE"] = str(
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "subquad", "tests")
)

import torch  # after the variables above

torch.set_num_threads(1)
shutil.rmtree(Path(os.environ["SUBQUAD_CACHE"], "tuning"), ignore_errors=True)
