"""What every test shares: no hub, one thread."""

from __future__ import annotations

import os

# Set before anything imports a library that reads them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # after the variables above

torch.set_num_threads(1)
