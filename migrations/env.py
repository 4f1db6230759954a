"""Alembic's entry: runs the migrations on the connection that `pipeline.store.schema` hands over.

Used by `rollout db upgrade`. Revisions are written by hand, as SQL (docs/adr/0031).
"""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"], transaction_per_migration=True
)
with context.begin_transaction():
    context.run_migrations()
