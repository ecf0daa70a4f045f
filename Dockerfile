# A server of one model's precision on one H100 or H200. Kernels are built with the image; it needs no compiler to run,
# and compiles nothing. CUDA comes with torch, the driver (580 or newer) with the host's container toolkit.
#
#   docker build --build-arg CONFIG=llama-3.1-8b --build-arg PRECISION=fp8-int4 -t futransformer .
#   docker run --gpus all -p 8000:8000 -v ~/models/Llama-3.1-8B-Instruct:/model:ro -e FUTRANSFORMER_API_KEY futransformer

FROM python:3.12.12-slim-bookworm AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml LICENSE README.md ./
COPY futransformer futransformer
COPY generator generator
COPY build build
COPY templates templates
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && pip install --no-cache-dir "$(echo /wheels/futransformer-*.whl)[toolchain]"
ARG CONFIG=llama-3.1-8b
ARG PRECISION=bf16
RUN futransformer build "$CONFIG" --precision "$PRECISION" --wheel /wheels

FROM python:3.12.12-slim-bookworm
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/futransformer-*.whl)[serve]" \
    && pip install --no-cache-dir --no-deps /wheels/futransformer_kernels_*.whl \
    && rm -r /wheels \
    && useradd --create-home --uid 1000 futransformer
USER futransformer
ARG PRECISION=bf16
ENV FUTRANSFORMER_DISABLE_JIT=1 \
    PRECISION=$PRECISION
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["/bin/sh", "-c", "exec futransformer serve /model --host 0.0.0.0 --precision \"$PRECISION\" \"$@\"", "--"]
