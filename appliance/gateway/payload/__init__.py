"""What stands in bodies of requests and answers: weighed, checked, counted. Pure functions over bytes.

Never: It opens no socket, reads no clock and holds no state.
Begin with request_check.py.
"""
