"""The same peers on virtual time: delays, loss, outages and churn cost nothing but the training
itself.
"""
