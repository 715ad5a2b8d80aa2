"""Give the tiny GPT of bridge_pretrain.py settings that do not act, in each way in which Megatron-Bridge takes some.

    python bridge_idle_settings.py FOLDER SECTION.NAME NAME ...

Prints why they are refused as overrides, as overrides with `+` and in a YAML file, and ends as `pretrain` refuses them
as attributes.
"""

import sys
from pathlib import Path


def main(folder, *paths):
    from bridge_pretrain import configure
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
    from omegaconf import OmegaConf

    configuration = configure(Path(folder), 1)
    overrides = [f"{path}=0.05" for path in paths]
    file = Path(folder, "settings.yaml")
    OmegaConf.save(OmegaConf.from_dotlist(overrides), file)
    for words in (overrides, [f"+{word}" for word in overrides], None):
        try:
            process_config_with_overrides(configuration, None if words else str(file), words)
        except ValueError as error:
            print(error)
    for path in paths:
        section, _, name = path.rpartition(".")
        setattr(getattr(configuration, section) if section else configuration, name, 0.05)
    pretrain(configuration, forward_step)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins" / "nvrx"))
    main(*sys.argv[1:])
