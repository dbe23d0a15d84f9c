"""Short stories made by rule, for the starter model's pretraining text (see `train.starter.text`)."""

from __future__ import annotations

import random
from dataclasses import dataclass

ANIMALS = tuple(
    (
        "cat dog fox bear rabbit mouse bird owl duck horse frog turtle lion elephant squirrel dragon whale bee "
        "hedgehog robot"
    ).split()
)
THINGS = tuple(
    (
        "ball hat kite lamp key map boat drum book cake box bell stone ring apple letter umbrella basket blanket clock"
    ).split()
)
NAMES = (
    ("Lily", "she"),
    ("Max", "he"),
    ("Mia", "she"),
    ("Oscar", "he"),
    ("Ruby", "she"),
    ("Finn", "he"),
    ("Luna", "she"),
    ("Theo", "he"),
    ("Nora", "she"),
    ("Milo", "he"),
    ("Zoe", "she"),
    ("Hugo", "he"),
    ("Ella", "she"),
    ("Otto", "he"),
    ("Ivy", "she"),
    ("Bruno", "he"),
)
TRAITS = ("little", "kind", "brave", "curious", "clever", "quiet", "happy", "lonely", "young", "gentle")
LOOKS = ("red", "blue", "golden", "old", "shiny", "small", "big", "beautiful", "strange", "green", "soft", "heavy")
WEATHER = ("sunny", "rainy", "windy", "cold", "warm", "snowy", "cloudy")
MORALS = (
    "From that day on, they were best friends.",
    "It was the best day of all.",
    "And they were happy ever after.",
    "{Name} learned that it is good to share.",
    "{Name} learned that asking for help is brave.",
    "That night, {name} slept very well.",
    "{Name} never forgot that day.",
    "{Name} was proud and happy.",
)


@dataclass(frozen=True)
class Place:
    """A scene: `name` as in "to {name}", `phrase` as in "a fox {phrase}"."""

    name: str
    phrase: str


PLACES = tuple(
    Place(name, phrase)
    for name, phrase in (
        ("the forest", "in the forest"),
        ("the park", "in the park"),
        ("the beach", "at the beach"),
        ("the river", "by the river"),
        ("the market", "at the market"),
        ("the garden", "in the garden"),
        ("the mountain", "on the mountain"),
        ("the school", "at school"),
        ("the farm", "on the farm"),
        ("the city", "in the city"),
        ("the moon", "on the moon"),
        ("the sea", "by the sea"),
    )
)


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _problem(r: random.Random, name: str, he: str, thing: str) -> tuple[str, str]:
    """What went wrong, and how the friend `{friend}` helped."""
    his = "his" if he == "he" else "her"
    him = "him" if he == "he" else "her"
    He = _capital(he)
    return r.choice(
        (
            (
                f"But then {he} lost the {thing}. {He} looked everywhere, but {he} could not find it.",
                f"{{Friend}} looked under a tree and found the {thing}.",
            ),
            (f"But the {thing} was broken. {name} was very sad.", f"{{Friend}} helped {him} to repair the {thing}."),
            (
                f"But the {thing} was too heavy to carry. {name} pulled and pulled, but it did not move.",
                f"{{Friend}} pulled too, and together they could carry the {thing} home.",
            ),
            (
                f"But the {thing} fell into the water. {name} did not know how to swim.",
                f"{{Friend}} jumped into the water and brought the {thing} back.",
            ),
            (
                f"Then it became dark, and {name} did not know the way home. {He} was afraid.",
                f"{{Friend}} knew the way and took {him} home.",
            ),
            (
                f"But somebody else wanted the {thing} too. They began to argue.",
                f"{{Friend}} said that they could share the {thing}, and so they did.",
            ),
            (
                f"Then the wind took the {thing} and put it high up in a tree. {name} could not reach it.",
                f"{{Friend}} climbed up the tree and gave {him} the {thing}.",
            ),
            (
                f"{He} wanted to show it to {his} mother, but {his} mother was far away.",
                f"{{Friend}} went with {him}, and they walked all day until they found her.",
            ),
        )
    )


def story(r: random.Random, *, animal: str | None = None, place: Place | None = None, thing: str | None = None) -> str:
    """A story of five to nine sentences about a hero who finds something, meets trouble and is helped.

    What is given (`animal`, `place`, `thing`) appears in the story; the rest is drawn from `r`.
    """
    (name, he), (friend_name, _) = r.sample(NAMES, 2)
    if animal is None and r.random() < 0.4:
        animal = r.choice(ANIMALS)
    kind = animal or ("girl" if he == "she" else "boy")
    place = place or r.choice(PLACES)
    thing = thing or r.choice(THINGS)
    friend = r.choice((friend_name, f"{friend_name} the {r.choice(ANIMALS)}"))
    He, look, trait = _capital(he), r.choice(LOOKS), r.choice(TRAITS)
    opening = r.choice(
        (
            f"Once upon a time, there was {a(f'{trait} {kind}')} named {name}.",
            f"There was once {a(f'{trait} {kind}')} called {name}.",
            f"{name} was {a(f'{trait} {kind}')}.",
        )
    )
    scene = r.choice(
        (
            f"One {r.choice(WEATHER)} day, {name} went to {place.name}.",
            f"{He} lived {place.phrase}.",
            f"Every morning, {he} walked to {place.name}.",
        )
    )
    found = r.choice(
        (
            f"There {he} found {a(f'{look} {thing}')}.",
            f"{He} saw {a(f'{look} {thing}')} {place.phrase}.",
            f"{He} had {a(f'{look} {thing}')} and took it everywhere.",
        )
    )
    feeling = r.choice(
        (
            f"{He} liked the {thing} very much.",
            f'"What a {look} {thing}!" said {name}.',
            f"{name} was very happy.",
            "",
        )
    )
    trouble, help_ = _problem(r, name, he, thing)
    meets = r.choice(
        (
            f"Then {friend} came by.",
            f"{name} asked {friend} for help.",
            f'"Can I help you?" asked {friend}.',
            f"{friend} saw it and came to help.",
        )
    )
    thanks = r.choice((f'"Thank you!" said {name}.', f"{name} smiled and said thank you.", "They both laughed."))
    moral = r.choice(MORALS).format(Name=name, name=name)
    parts = (opening, scene, found, feeling, trouble, meets, help_.format(Friend=friend_name), thanks, moral)
    return " ".join(part for part in parts if part)
