"""The web page that the box serves at `/ui`: static files that call `/admin/v1` and `/v1` like any client.

Never: Knows a key, reads state of the controller or the gateway, or builds HTML from data.
Begin with site.py (what is sent), then static/app.js (what it does).
"""
