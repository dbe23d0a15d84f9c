"""Logins of the page by an OpenID provider: the code flow with PKCE, and what a person's groups may do here.

Owns: the way to the provider and back, what an identity token has to say, the key that a person has. Never: sees a
password; gives a person more than the groups of the settings do. Begin with routes.py.
"""
