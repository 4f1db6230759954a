# The image of every process: migrate, controller, worker, flower. The command says which.
# EXTRAS adds optional parts, for example --build-arg EXTRAS=sqs,parquet

FROM python:3.13-slim AS build
ARG EXTRAS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/rollout
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY migrations ./migrations
COPY rollout ./rollout
COPY pipeline ./pipeline
COPY producers ./producers
COPY workers ./workers
RUN /opt/rollout/bin/pip install ".${EXTRAS:+[$EXTRAS]}"

FROM python:3.13-slim
RUN groupadd --system --gid 10001 rollout \
    && useradd --system --uid 10001 --gid 10001 --home-dir /var/lib/rollout --no-create-home \
       --shell /usr/sbin/nologin rollout \
    && install --directory --owner 10001 --group 10001 --mode 0750 /var/lib/rollout
COPY --from=build /opt/rollout /opt/rollout
ENV PATH=/opt/rollout/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ROLLOUT_DATA_DIR=/var/lib/rollout
WORKDIR /var/lib/rollout
USER 10001:10001
CMD ["rollout", "--help"]
