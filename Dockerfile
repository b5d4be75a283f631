# vLLM and all components on the public CANN image, as docs/installation.md installs them. A weekly job of .github/workflows/ci.yml
# builds and starts it. It has not been run with a real NPU.
#
#   docker build -t vllm-ascend-all .
#   docker build -t vllm-ascend-all --build-arg CANN=9.1.0-a3-ubuntu22.04-py3.11 .
#
# The tag says CANN's version, the chip, the system and Python; see https://quay.io/repository/ascend/cann?tab=tags.
# CANN 9.1 is the version that torch-npu 2.13 goes with.
ARG CANN=9.1.0-910b-ubuntu22.04-py3.11
FROM quay.io/ascend/cann:${CANN}

ENV VIRTUAL_ENV=/opt/vllm-ascend-all
ENV PATH=${VIRTUAL_ENV}/bin:${PATH} UV_NO_CACHE=1

# The image's own packages stay visible, as CANN's compiler of operators imports some of them.
RUN python3 -m pip install --no-cache-dir uv==0.13.8 \
    && uv venv --system-site-packages --python "$(command -v python3)" "${VIRTUAL_ENV}"

WORKDIR /opt/src
# vLLM without compiled kernels, torch-npu and everything else: a layer that a change of our packages does not rebuild.
COPY pyproject.toml ./
COPY tools/environment/requirements.txt tools/environment/
RUN uv pip install --no-deps --torch-backend cpu -r tools/environment/requirements.txt

COPY packages packages
RUN uv build --all-packages --wheel && uv pip install --no-deps dist/*.whl && rm -r dist

# Not root: the container needs the group of the host's NPUs, `--group-add "$(stat -c %g /dev/davinci_manager)"`.
RUN useradd --create-home --uid 10001 vllm
USER 10001
WORKDIR /home/vllm

# The environment of CANN, which is under one name or the other.
ENTRYPOINT ["/bin/bash", "-c", "for name in cann ascend-toolkit; do file=/usr/local/Ascend/$name/set_env.sh; if [ -f $file ]; then source $file; break; fi; done; exec \"$@\"", "--"]
CMD ["vllm-ascend", "--help"]
