"""Tiered speculative decoding as Transformers' ``custom_generate`` folder.

model.generate(**inputs, custom_generate="path/or/hub-name", trust_remote_code=True, drafter="prompt-lookup")
"""

import copy
from typing import Any


def generate(
    model: Any,
    *,
    generation_config: Any = None,
    tokenizer: Any = None,
    streamer: Any = None,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    stop_strings: Any = None,
    synced_gpus: Any = None,
    drafter: Any = "prompt-lookup",
    route: Any = None,
    speculation: Any = None,
    **arguments: Any,
) -> Any:
    """``model.generate`` with ``viasd.transformers_generate``, whose docstring says what the arguments mean."""
    import viasd

    if generation_config is not None and generation_config.stop_strings is not None:
        stop_strings = generation_config.stop_strings if stop_strings is None else stop_strings
        generation_config = copy.deepcopy(generation_config)
        generation_config.stop_strings = None
    decode = viasd.transformers_generate(
        drafter=drafter,
        route=route,
        speculation=speculation,
        tokenizer=tokenizer,
        streamer=streamer,
        assistant_model=assistant_model,
        stop_strings=stop_strings,
        synced_gpus=synced_gpus,
    )
    return model.generate(generation_config=generation_config, custom_generate=decode, **arguments)
