"""``colossalai benchmark``: every tensor-parallel configuration of some devices, timed on one small model.

command.py     the options
plans.py       which configurations there are
runner.py      one configuration after the other, each on processes of its own; progress; failures
measure.py     what each process does: build, warm up, time, count
models.py      what is measured
report.py      lines, table and picture
serve.py       colossalai benchmark serve: a load for a server, its table and picture
load.py        which requests, and when their tokens came
"""
