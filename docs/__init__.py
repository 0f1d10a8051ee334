"""The documentation: its pages (`source`), their tests (`test`, `check`) and their site (`build`)."""
