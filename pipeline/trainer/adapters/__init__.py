"""Train batches in the forms of other libraries; each module needs its extra when it is used."""

#: The code of errors for trainers, or settings of them, that do not fit the run.
E_UNFIT = "E137"
