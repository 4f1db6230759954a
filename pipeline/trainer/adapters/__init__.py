"""Train batches in the forms of other libraries; each module needs its extra when it is used."""
