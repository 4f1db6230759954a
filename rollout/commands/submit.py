"""`rollout submit`: enqueue a dataset as a run's prompts, groups and rollouts."""

from __future__ import annotations

import typer

from rollout.deployment import opened, settings_of
from rollout.known_names import find_unknown
from rollout.options import Json, takes
from rollout.output import note, print_answer
from rollout.request_queue import require_allowed_endpoint
from rollout.run_options import SubmitOptions, run_config
from rollout.submission import enqueue_dataset, require_source


@takes(SubmitOptions, "options")
def submit(ctx: typer.Context, options: SubmitOptions, as_json: Json = False) -> None:
    """Enqueue a dataset for workers that run elsewhere.

    Repeating the command adds only missing prompts.
    """
    settings = settings_of(ctx)
    config = run_config(options, settings.run, agentcore=settings.agentcore)
    require_source(options)
    with opened(ctx, create=True) as deployment:
        for unknown in find_unknown(
            config,
            plugins=deployment.settings.worker.plugins,
            mcp_servers=deployment.settings.worker.mcp,
        ):
            note(f"Warning: {unknown} Workers must have it among their plug-ins.")
        require_allowed_endpoint(deployment, config)
        submission = enqueue_dataset(deployment, options, config)
    print_answer(submission.to_json(), str(submission), as_json=as_json)
    if not as_json:
        note(f"Follow it: rollout watch {submission.report.run.slug}")
