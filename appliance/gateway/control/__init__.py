"""Handles requests that the controller answers: relayed, scraped, or made on behalf of a response.

Never: Answers from the gateway's own knowledge, except /metrics.
Begin with controller.py.
"""
