"""What the tests add to SGLang on a CPU: an attention backend that honours the verify mask. Its models
are in models/.

Loaded by SGLang's own plugin mechanism, because this folder is on PYTHONPATH in the server's environment.
"""

import os


def register():
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    def masked_torch_native(runner):
        from agentspec_cpu_rig.attention import MaskedTorchNativeBackend

        return MaskedTorchNativeBackend(runner)

    ATTENTION_BACKENDS["torch_native"] = masked_torch_native
