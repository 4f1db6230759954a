"""Train batches in the forms of other libraries; each module needs its extra when it is used."""

#: The code of a trainer, or of a setting of it, that does not fit what a run has.
E_UNFIT = "E137"
