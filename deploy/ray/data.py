"""`dubito ray-score`: the parts of a job as rows of a Ray data set, which actors on any node make."""

from dataclasses import asdict
from typing import Any

import numpy as np
import ray
import ray.data

from dubito.service.scoring.parts import PartsFolder, ScoringJob
from dubito.service.scoring.score import Progress, Scorer, Scoring


class PartScorer:
    """An actor of the data set: makes parts, and says how many rows each had."""

    def __init__(self, fields: dict[str, Any], device: str) -> None:
        self.scorer = Scorer(Scoring(**fields), device)
        self.job = self.scorer.prepare()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        done: list[int] = []
        self.scorer.score(batch["item"].tolist(), self.job, done.append)
        return {"rows": np.array(done)}


def prepare(fields: dict[str, Any], device: str) -> None:
    """Record the job before its parts are counted."""
    Scorer(Scoring(**fields), device).prepare()


def score_parts(
    workers: int, cpus: float, gpus: float, asked: Scoring, folder: PartsFolder, progress: Progress
) -> tuple[ScoringJob, set[int]]:
    """Make the missing parts. Ray makes a part again whose actor or node is lost."""
    fields, device = asdict(asked), "cuda:0" if gpus else "cpu"
    ray.get(ray.remote(prepare).options(num_cpus=cpus, num_gpus=gpus).remote(fields, device))
    job = folder.job()
    assert job is not None
    finished = folder.finished(job)
    missing = [i for i in range(job.parts) if i not in finished]
    with progress(job.rows_of(missing)) as done:
        if missing:
            parts = ray.data.from_items(missing, override_num_blocks=len(missing)).map_batches(
                PartScorer,
                batch_size=1,
                fn_constructor_args=(fields, device),
                compute=ray.data.ActorPoolStrategy(size=workers),
                num_cpus=cpus,
                num_gpus=gpus,
            )
            for batch in parts.iter_batches(batch_size=None):
                done(int(batch["rows"].sum()))
    return job, finished
