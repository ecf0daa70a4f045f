"""An OpenAI-compatible HTTP server on one engine (docs/serving.md); needs the extra ``futransformer[serve]``.

Three threads share the work: the event loop speaks HTTP and never computes, one thread runs ``Engine.step``, which is
confined to it, and one turns text into tokens. Each step costs one call into the loop, whatever the batch.

server.py listens and ends; limits.py (key, size, slow clients) -> app.py (routes) -> protocol.py (what a request may
ask) -> service.py -> runner.py (the engine's thread) -> answers.py (what a client reads); metrics.py counts.
"""
