# Two images (docs/deploying.md has a compose file): `docker build --target broker .` and `docker build --target worker .`
#
# Only their owner may read keys (mode 0600), so the containers run as you, not as a user of the image. What
# keygen put into keys/clients is moved to its machine, and each worker gets its one file:
#
#   mkdir data && mkdir -m 700 keys
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/keys:/keys" BROKER keygen /keys gpu-0
#   docker run --rm --user "$(id -u):$(id -g)" -p 8512:8512 -p 8513:8513 \
#     -v "$PWD/data:/data" -v "$PWD/keys:/keys:ro" BROKER \
#     serve --keys /keys --workers 1 --bind tcp://0.0.0.0:8512 --feed tcp://0.0.0.0:8513
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" \
#     -v "$PWD/worker-gpu-0.key:/key:ro" -e DILOCO_KEYS=/key -e DILOCO_SERVER=tcp://BROKER_HOST:8512 \
#     WORKER run -- python train.py
#
# Build arguments: TORCH, the requirement (for CUDA: torch), and TORCH_INDEX, the package index that has
# the build that you want; without it the usual one, whose builds for Linux come with CUDA.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && pip install --no-cache-dir build
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY protocol protocol
COPY broker broker
COPY worker worker
COPY tools tools
RUN python -m build --wheel --outdir /wheels

FROM python:${PYTHON}-slim AS base
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[prometheus]" && rm -r /wheels \
    && useradd --create-home diloco

FROM base AS broker
RUN mkdir /data && chown diloco /data
USER diloco
WORKDIR /data
VOLUME /data
EXPOSE 8512 8513
# Docker sends SIGTERM and kills after 10 s: give `docker stop` the time that the last checkpoint takes.
STOPSIGNAL SIGTERM
ENTRYPOINT ["diloco-broker"]
CMD ["serve"]

FROM base AS worker
USER diloco
WORKDIR /work
STOPSIGNAL SIGTERM
ENTRYPOINT ["diloco-worker"]
CMD ["--help"]
