"""What has changed at the box, as a stream of events for pages that are open: who follows, what each may hear of.

Never: Sends what changed itself; it is asked for where it always was, by the rules there.
Begin with hub.py.
"""
