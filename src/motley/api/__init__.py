"""A crew in Python: `motley.Crew`, `motley.Peer`, `motley.Run`.

The same parts as the crew file, which a crew can write and read. This room has the words of its
users: a `Peer` here is what one writes down of a peer, a `Run` what one reads of a run.
"""
