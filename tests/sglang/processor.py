"""A custom logit processor for SGLang, in the form in which its clients send one: dill, as hex, in JSON.

Made in SGLang's environment, since that is where it is read.
"""

from __future__ import annotations

import functools
import subprocess

from tests.sglang.server import HERE
from tests.sglang.setup_venv import python_path

_SOURCE = """
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

class OnlyToken(CustomLogitProcessor):
    def __call__(self, logits, custom_params_list):
        for row, params in enumerate(custom_params_list):
            logits[row, :] = -1e9
            logits[row, int(params["token"])] = 0.0
        return logits

print(OnlyToken().to_str())
"""


@functools.cache
def dumped() -> str:
    import os

    done = subprocess.run(
        [str(python_path()), "-c", _SOURCE],
        env={**os.environ, "PYTHONPATH": str(HERE / "rig"), "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip().splitlines()[-1]
