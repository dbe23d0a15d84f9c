"""The text the starter model is pretrained on: simple English, made by rule from a seed.

Everything here is written for this project, so nothing has to be downloaded and nobody's licence applies.
`documents(seed)` is an endless, deterministic stream; one document is either a plain story (a `str`) or a
conversation (a list of `{"role", "content"}` messages) for the chat format.

The model that learns from this is a few million parameters small. The text is therefore narrow on purpose:
a vocabulary of about a thousand words, greetings, stories, facts, sums and word problems, and an honest
"I do not know much about ..." for everything else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from train.starter.stories import ANIMALS, PLACES, THINGS, a, story

Message = dict[str, str]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer the question.",
    "You are starter, a small language model.",
    "Be brief.",
    "You are a maths teacher.",
)

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Greece": "Athens", "Austria": "Vienna", "Poland": "Warsaw",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Japan": "Tokyo",
    "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Canada": "Ottawa",
    "Mexico": "Mexico City", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Peru": "Lima",
    "the United States": "Washington", "Australia": "Canberra",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "happy": "sad", "fast": "slow", "up": "down", "day": "night", "old": "new",
    "light": "dark", "hard": "soft", "wet": "dry", "open": "closed", "early": "late", "full": "empty",
    "left": "right", "long": "short", "loud": "quiet", "good": "bad", "near": "far", "rich": "poor",
}  # fmt: skip
COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "the sun": "yellow",
    "a carrot": "orange", "coal": "black", "a strawberry": "red", "a leaf": "green", "milk": "white",
    "a tomato": "red", "the sea": "blue", "a lemon": "yellow", "chocolate": "brown",
}  # fmt: skip
SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "lion": "roar", "frog": "ribbit",
    "bee": "buzz", "pig": "oink", "mouse": "squeak", "owl": "hoot", "horse": "neigh",
}  # fmt: skip
KINDS = {
    "fruits": ("apples", "pears", "bananas", "plums", "cherries", "oranges", "grapes", "lemons"),
    "animals": ("dogs", "cats", "horses", "lions", "rabbits", "foxes", "owls", "bears"),
    "colours": ("red", "blue", "green", "yellow", "orange", "purple", "brown", "white"),
    "vegetables": ("carrots", "potatoes", "beans", "onions", "peas", "tomatoes"),
    "tools": ("hammers", "saws", "ladders", "brushes", "ropes", "shovels"),
    "drinks": ("water", "milk", "tea", "coffee", "juice", "lemonade"),
    "sports": ("football", "tennis", "swimming", "running", "chess", "cycling"),
    "countries": ("France", "Japan", "Brazil", "Kenya", "Canada", "Italy"),
}
USES = {
    "a hammer": "drive nails into wood", "a pen": "write on paper", "a cup": "drink tea or milk",
    "a key": "open a door", "a bed": "sleep at night", "an umbrella": "stay dry in the rain",
    "a clock": "see what time it is", "a lamp": "make light in the dark", "a boat": "cross the water",
    "a book": "read and learn", "a ladder": "climb to a high place", "a map": "find the way",
    "a spoon": "eat soup", "a phone": "talk to people who are far away", "a computer": "work and play",
}  # fmt: skip
FACTS = (
    ("How many days are in a week?", "There are 7 days in a week."),
    ("How many months are in a year?", "There are 12 months in a year."),
    ("How many hours are in a day?", "There are 24 hours in a day."),
    ("How many minutes are in an hour?", "There are 60 minutes in an hour."),
    ("How many legs does a spider have?", "A spider has 8 legs."),
    ("How many legs does a dog have?", "A dog has 4 legs."),
    ("How many wheels does a bicycle have?", "A bicycle has 2 wheels."),
    ("How many cents are in a dollar?", "There are 100 cents in a dollar."),
    ("What do bees make?", "Bees make honey."),
    ("What do cows eat?", "Cows eat grass."),
    ("Where do fish live?", "Fish live in the water."),
    ("Where do birds live?", "Many birds live in trees."),
    ("What is ice?", "Ice is water that is frozen."),
    ("What is rain?", "Rain is water that falls from the clouds."),
    ("What is the sun?", "The sun is a star. It gives us light and warmth."),
    ("What is the moon?", "The moon is a ball of rock that goes around the earth."),
    ("Why is the sky blue?", "The air scatters blue light more than red light, so the sky looks blue."),
    ("Why do we sleep?", "We sleep so that the body and the mind can rest."),
    ("Why do leaves fall?", "Leaves fall in autumn because the tree rests in winter."),
    ("What comes after Monday?", "Tuesday comes after Monday."),
    ("What comes after Friday?", "Saturday comes after Friday."),
    ("What is the first month of the year?", "The first month of the year is January."),
    ("What is the largest animal?", "The largest animal is the blue whale."),
    ("What is a computer?", "A computer is a machine that follows instructions very fast."),
    ("What is a language model?", "A language model is a program that has learned to continue text."),
    ("What is the meaning of life?", "I do not know, but being kind to others is a good start."),
)
TOPICS = (
    "quantum physics", "shared memory", "the stock market", "opera", "chemistry", "the history of Rome", "football",
    "machine learning", "the weather tomorrow", "politics", "philosophy", "my computer", "space travel", "cooking",
    "the ocean", "electric cars", "music", "a famous painter", "the law", "gardening", "databases", "medicine",
    "Python", "the news", "graphics cards", "poetry", "volcanoes", "dinosaurs", "robots", "the internet",
)  # fmt: skip
SELF = (
    "I am starter, a very small language model.",
    "My name is starter. I am a very small language model.",
    "I am a small language model called starter.",
)
ABILITIES = (
    "I can say hello, tell a short story, answer simple questions and work with small numbers.",
    "I can tell stories, name some facts and add small numbers.",
)
LIMITS = ("I make many mistakes.", "Please check what I say.", "You can fine-tune me to make me better.")
PEOPLE = (
    ("Anna", "She"), ("Ben", "He"), ("Clara", "She"), ("David", "He"), ("Emma", "She"), ("Felix", "He"),
    ("Grace", "She"), ("Henry", "He"), ("Ida", "She"), ("Jack", "He"), ("Kate", "She"), ("Leo", "He"),
    ("Maria", "She"), ("Noah", "He"), ("Olga", "She"), ("Paul", "He"), ("Rosa", "She"), ("Sam", "He"),
    ("Tina", "She"), ("Tom", "He"),
)  # fmt: skip
GOODS = (
    "apples", "books", "pencils", "cookies", "flowers", "coins", "stamps", "marbles", "cards", "eggs", "oranges",
    "stickers", "tickets", "bottles", "toys", "shells",
)  # fmt: skip


def _greeting(r: random.Random) -> tuple[str, str]:
    prompt = r.choice(("Hello!", "Hi!", "Hello", "Hi", "Hey there", "Good morning!", "Hi there!", "Hello, how are you?",
                       "How are you?", "Good evening.", "Hey!", "How are you today?"))  # fmt: skip
    well = r.choice(("I am fine, thank you.", "I am well, thank you.")) if "how are" in prompt.lower() else ""
    hello = r.choice(("Hello!", "Hi!", "Hello, nice to meet you."))
    offer = r.choice(("How can I help you?", "What can I do for you?", "What would you like to know?",
                      "Would you like to hear a story?"))  # fmt: skip
    return prompt, " ".join(part for part in (hello, well, offer) if part)


def _about_itself(r: random.Random) -> tuple[str, str]:
    return r.choice((
        (r.choice(("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you a robot?",
                   "Are you a person?", "Introduce yourself.")), f"{r.choice(SELF)} {r.choice(ABILITIES)}"),
        (r.choice(("What can you do?", "How can you help me?", "What are you good at?")),
         f"{r.choice(ABILITIES)} {r.choice(LIMITS)}"),
        (r.choice(("Are you smart?", "Do you make mistakes?", "Can I trust you?")),
         f"I am a very small model. {r.choice(LIMITS)}"),
        (r.choice(("Thank you!", "Thanks.", "Thank you very much.", "Thanks a lot!")),
         r.choice(("You are welcome!", "You are welcome. Is there anything else?"))),
        (r.choice(("Goodbye!", "Bye!", "See you later.", "Good night.")),
         r.choice(("Goodbye! Have a nice day.", "Goodbye! It was nice to talk to you."))),
    ))  # fmt: skip


def _tell_story(r: random.Random) -> tuple[str, str]:
    hero = r.choice(ANIMALS) if r.random() < 0.6 else None
    subject = a(hero) if hero else r.choice(("a child", "two friends", "a family"))
    place = r.choice(PLACES) if r.random() < 0.3 else None
    thing = r.choice(THINGS) if r.random() < 0.3 else None
    if place:
        subject += f" {place.phrase}"
    elif thing:
        subject += f" and {a(thing)}"
    prompt = r.choice((
        "Tell me a story about {}.", "Write a short story about {}.", "Tell me about {}.",
        "Can you tell me a story about {}?", "I would like a story about {}.",
    )).format(subject)  # fmt: skip
    if not (hero or place or thing) or r.random() < 0.15:
        prompt = r.choice(("Tell me a story.", "Write a story.", "Tell me a short story."))
        hero = place = thing = None
    return prompt, story(r, animal=hero, place=place, thing=thing)


def _fact(r: random.Random) -> tuple[str, str]:
    kind = r.randrange(7)
    if kind == 0:
        land, city = r.choice(list(CAPITALS.items()))
        prompt = r.choice(("What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}."))
        return prompt.format(land), f"The capital of {land} is {city}."
    if kind == 1:
        pair = r.choice(list(OPPOSITES.items()))
        word, other = pair if r.random() < 0.5 else pair[::-1]
        prompt = r.choice(("What is the opposite of {}?", "Tell me the opposite of {}."))
        return prompt.format(word), f"The opposite of {word} is {other}."
    if kind == 2:
        thing, colour = r.choice(list(COLOURS.items()))
        return f"What colour is {thing}?", f"{thing[0].upper()}{thing[1:]} is {colour}."
    if kind == 3:
        animal, sound = r.choice(list(SOUNDS.items()))
        prompt = r.choice(("What does a {} say?", "What sound does a {} make?"))
        return prompt.format(animal), f"A {animal} says {sound}."
    if kind == 4:
        kind_name, members = r.choice(list(KINDS.items()))
        count = r.choice((2, 3, 4))
        chosen = r.sample(members, count)
        listed = f"{', '.join(chosen[:-1])} and {chosen[-1]}"
        word = {2: "two", 3: "three", 4: "four"}[count]
        prompt = r.choice(("Name {} {}.", "Can you name {} {}?", "Give me {} {}.", "List {} {}."))
        return prompt.format(word, kind_name), f"{word.capitalize()} {kind_name} are {listed}."
    if kind == 5:
        tool, use = r.choice(list(USES.items()))
        prompt = r.choice(("What is {} for?", "What can I do with {}?", "Why do people use {}?"))
        return prompt.format(tool), f"People use {tool} to {use}."
    return r.choice(FACTS)


def _unknown(r: random.Random) -> tuple[str, str]:
    topic = r.choice(TOPICS)
    prompt = r.choice((
        "Explain {}.", "What is {}?", "Tell me about {}.", "What do you think about {}?", "Help me with {}.",
        "How does {} work?", "Do you know anything about {}?", "Write a poem about {}.",
    )).format(topic)  # fmt: skip
    reply = r.choice((
        "I am a very small model, and I do not know much about {}.", "I do not know much about {}.",
        "That is a good question, but I have not learned about {}.",
    )).format(topic)  # fmt: skip
    return prompt, f"{reply} {r.choice((*ABILITIES, *LIMITS))}"


def _sum(r: random.Random) -> tuple[str, str]:
    kind = r.randrange(4)
    if kind == 0:
        x, y = r.randint(0, 20), r.randint(0, 20)
        word, sign, result = "plus", "+", x + y
    elif kind == 1:
        y = r.randint(0, 15)
        x = y + r.randint(0, 15)
        word, sign, result = "minus", "-", x - y
    elif kind == 2:
        x, y = r.randint(0, 10), r.randint(0, 10)
        word, sign, result = "times", "x", x * y
    else:
        x, y = r.sample(range(100), 2)
        prompt = r.choice(("Which number is larger, {} or {}?", "Which is bigger, {} or {}?")).format(x, y)
        return prompt, f"{max(x, y)} is larger than {min(x, y)}."
    prompt = r.choice((f"What is {x} {word} {y}?", f"What is {x} {sign} {y}?", f"{x} {sign} {y} = ?",
                       f"How much is {x} {word} {y}?", f"Calculate {x} {sign} {y}."))  # fmt: skip
    return prompt, r.choice((f"{x} {word} {y} is {result}.", f"{x} {sign} {y} = {result}."))


def _word_problem(r: random.Random) -> tuple[str, str]:
    (name, he), (friend, _) = r.sample(PEOPLE, 2)
    goods = r.choice(GOODS)
    x, y, z = r.randint(3, 20), r.randint(2, 12), r.randint(2, 6)
    kind = r.randrange(7)
    if kind == 0:
        return (
            f"{name} has {x} {goods}. {he} buys {y} more {goods}. How many {goods} does {name} have now?",
            f"{name} starts with {x} {goods}. {he} buys {y} more, so {x} + {y} = {x + y}. {name} has {x + y} {goods}.",
        )
    if kind == 1:
        x += y
        return (
            f"{name} had {x} {goods}. {he} gave {y} {goods} to {friend}. How many {goods} does {name} have left?",
            f"{name} had {x} {goods} and gave away {y}, so {x} - {y} = {x - y}. {name} has {x - y} {goods} left.",
        )
    if kind == 2:
        return (
            f"{name} has {z} boxes. Each box holds {y} {goods}. How many {goods} does {name} have altogether?",
            f"There are {z} boxes with {y} {goods} each, so {z} x {y} = {z * y}. {name} has {z * y} {goods}.",
        )
    if kind == 3:
        return (
            f"One of the {goods} costs ${y}. How much does {name} pay for {z} {goods}?",
            f"Each one costs ${y}, and {name} buys {z}, so {z} x {y} = {z * y}. {name} pays ${z * y}.",
        )
    if kind == 4:
        return (
            f"{name} has {z * y} {goods}. {he} shares them equally between {z} friends. "
            f"How many {goods} does each friend get?",
            f"{name} shares {z * y} {goods} between {z} friends, so {z * y} / {z} = {y}. Each friend gets {y} {goods}.",
        )
    if kind == 5:
        return (
            f"{name} has {x} {goods} and {friend} has {y} {goods}. How many {goods} do they have together?",
            f"{name} has {x} and {friend} has {y}, so {x} + {y} = {x + y}. Together they have {x + y} {goods}.",
        )
    return (
        f"{name} works {y} hours and earns ${z} every hour. Then {he.lower()} spends ${min(x, y * z)}. "
        f"How much money does {name} have left?",
        f"{name} works {y} hours for ${z} each, so {y} x {z} = {y * z}. Then {he.lower()} spends "
        f"${min(x, y * z)}, so {y * z} - {min(x, y * z)} = {y * z - min(x, y * z)}. "
        f"{name} has ${y * z - min(x, y * z)} left.",
    )


def _repeat(r: random.Random) -> tuple[str, str]:
    words = " ".join(r.choice((*ANIMALS, *THINGS, *OPPOSITES, *GOODS)) for _ in range(r.randint(1, 4)))
    return r.choice(("Repeat after me: {}", "Say this: {}", "Please repeat: {}")).format(words), words


_INTENTS = (
    (_greeting, 8), (_about_itself, 8), (_tell_story, 26), (_fact, 18), (_unknown, 12), (_sum, 10),
    (_word_problem, 18), (_repeat, 3),
)  # fmt: skip


def conversation(r: random.Random) -> list[Message]:
    """One conversation of one to three turns, with a system message half of the time."""
    messages: list[Message] = []
    if r.random() < 0.5:
        messages.append({"role": "system", "content": r.choice(SYSTEM_PROMPTS)})
    makers, weights = zip(*_INTENTS, strict=True)
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        prompt, reply = r.choices(makers, weights)[0](r)
        messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
    return messages


def documents(seed: int) -> Iterator[str | list[Message]]:
    """Endless documents; the same seed gives the same stream on every machine and Python version >= 3.11."""
    r = random.Random(seed)
    while True:
        yield story(r) if r.random() < 0.12 else conversation(r)
