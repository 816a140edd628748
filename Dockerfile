# Everything that `pip install` gives, in an image:
#
#   docker build -t bytescale .                                        # CPU ranks, and tools such as bytescale search
#   docker build -t bytescale --build-arg BASE=nvcr.io/nvidia/pytorch:TAG --build-arg EXTRAS=ray,data,tokenizers .
#   docker run --rm --shm-size 8g bytescale bytescale doctor
#
# The second one is for GPUs. Choose a TAG whose torch lies in the range of pyproject.toml: the image then keeps its own
# torch, TransformerEngine and flash-attn. Ranks of one machine share memory, hence --shm-size.
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG EXTRAS=ray,data,tokenizers
RUN if ! command -v g++ > /dev/null; then \
      apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*; \
    fi
WORKDIR /opt/bytescale
COPY . .
RUN python -m pip install --no-cache-dir ninja wheel && python -m pip install --no-cache-dir ".[${EXTRAS}]"
CMD ["bytescale", "--help"]
