"""Other engines' signatures over these ops: ``compat.sglang`` and ``compat.vllm``. Neither engine is imported."""
