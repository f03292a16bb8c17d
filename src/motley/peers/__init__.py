"""Who takes part in a crew: who learns, and who only samples with a learner's weights."""
