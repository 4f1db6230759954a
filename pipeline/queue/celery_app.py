"""The Celery application: JSON only, early acknowledgement, no results, events for Flower.

Made at entry points for the dispatcher, the worker and Flower. Must not: register tasks; the worker
registers them, and the dispatcher publishes by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from celery import Celery

from pipeline.contract.run import DEFAULT_REQUEST_QUEUE
from pipeline.queue.broker import Broker


def make_celery_app(
    broker: Broker,
    *,
    queues: Sequence[str] = (DEFAULT_REQUEST_QUEUE,),
    lease_s: float | None = None,
) -> Celery:
    """Return an application bound to a broker; connects when first used.

    Args:
        broker: The broker to connect to.
        queues: Request queues that a worker with this application consumes.
        lease_s: Silence after which a worker's attempts are lost; None for publishers.
    """
    app = Celery("rollout", broker=broker.url, set_as_current=False)
    app.conf.update(
        broker_transport_options=broker.transport_options,
        broker_use_ssl=broker.tls,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_connection_timeout=broker.connect_timeout_s,
        broker_pool_limit=4,
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        # Leases in the store recover lost attempts; a late ack would only add second executions.
        task_acks_late=False,
        task_queues=[broker.queue(name) for name in queues],
        task_default_queue=broker.prefix + queues[0],
        task_default_exchange="",
        task_default_routing_key=broker.prefix + queues[0],
        task_create_missing_queues=True,
        worker_prefetch_multiplier=1,
        # Idle workers cannot take a prefetched message. On SQS `ReserveFreePlaces` limits prefetch.
        worker_disable_prefetch=broker.kind == "redis",
        worker_disable_rate_limits=True,
        worker_send_task_events=True,
        worker_enable_remote_control=broker.has_remote_control,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        control_exchange=broker.prefix + "celery",
        event_exchange=broker.prefix + "celeryev",
        event_queue_prefix=broker.prefix + "celeryev",
        enable_utc=True,
        timezone="UTC",
    )
    if broker.kind == "amqp":
        app.conf.task_default_queue_type = "quorum"
        app.conf.task_create_missing_queue_type = "quorum"
        app.conf.worker_detect_quorum_queues = True
        # Idle publishers send no heartbeats; RabbitMQ would close their connections for that.
        app.conf.broker_heartbeat = 0
        if lease_s is not None:
            # RabbitMQ pushes requests to a frozen worker until two heartbeats are missed. Its
            # attempts must not be lost before that, or their retries would be pushed to it too.
            app.conf.broker_heartbeat = max(2, int(lease_s / 3))
    return app
