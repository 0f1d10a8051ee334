"""Pipeline parallelism: a model cut into stages, and schedules that keep the stages busy."""
