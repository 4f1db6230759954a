"""`rollout agentcore-local`: a stand-in for AgentCore Runtime on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.contract.errors import InputError
from rollout.output import note

E_APP = "E128"

#: Any ARN works; this one names the stand-in.
LOCAL_ARN = "arn:aws:bedrock-agentcore:us-east-1:000000000000:runtime/local"


def agentcore_local(
    app: Annotated[Path, typer.Argument(metavar="APP.py", help="The script that makes the app.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8090,
    requests_per_second: Annotated[
        float, typer.Option(min=0.1, help="Invocations and stops together.")
    ] = 25.0,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions at once.")] = 1000,
    idle_s: Annotated[
        float, typer.Option("--idle", min=0.1, help="Idle time, in seconds, that ends a session.")
    ] = 900.0,
) -> None:
    """Serve an app as AgentCore Runtime does.

    One process serves each session, within the quotas of the service.

    Sessions get the environment of this command: BASE_URL and MODEL_ID of the policy, and the
    endpoints of S3 and SQS. boto3 finds the service by AWS_ENDPOINT_URL_BEDROCK_AGENTCORE.
    """
    import socket

    import uvicorn

    from workers.agentcore.local_runtime import LocalRuntime, Quotas

    if not app.is_file():
        raise InputError(f"There is no app {app}.", remedy="Name its script.", code=E_APP)
    quotas = Quotas(requests_per_second, max_sessions, idle_s)
    runtime = LocalRuntime(app.resolve(), quotas=quotas)
    config = uvicorn.Config(runtime.application, log_level="warning", lifespan="on")
    with socket.create_server((host, port), backlog=1024) as listening:
        url = f"http://{host}:{listening.getsockname()[1]}"
        note(f"AgentCore's stand-in serves {app} at {url}. Let processes find it:")
        note(f"  export AWS_ENDPOINT_URL_BEDROCK_AGENTCORE={url}")
        note(f"  rollout run DATASET --executor agentcore --target {LOCAL_ARN}")
        server = uvicorn.Server(config)
        server.run([listening])
    if not server.started:
        raise InputError(f"{app} cannot be served.", why="See the lines above.", code=E_APP)
