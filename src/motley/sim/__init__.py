"""The same peers on virtual time: delays, outages and churn cost nothing but the training."""
