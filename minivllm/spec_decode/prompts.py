"""The prompts an EAGLE head is trained and measured on: our own templates over our own subjects, drawn by a seed. Pure Python.

Held-out prompts share neither a template nor a subject with training ones, so what is measured on them is not remembered.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

SUBJECTS: tuple[str, ...] = tuple(
    subject.strip()
    for line in """
    the water cycle, volcanoes, the moon, photosynthesis, magnets, lightning, earthquakes, the ocean floor, deserts, rainbows
    black holes, the solar system, gravity, the speed of light, atoms, batteries, electricity, sound waves, lenses, friction
    dolphins, honeybees, owls, penguins, elephants, wolves, butterflies, coral reefs, spiders, octopuses, horses, sea turtles
    sourdough bread, tomato soup, pancakes, green tea, coffee, chocolate cake, fried rice, a fruit salad, pizza dough, omelettes
    Python lists, recursion, sorting algorithms, databases, web browsers, operating systems, version control, unit tests
    hash tables, binary search, APIs, cloud storage, passwords, encryption, search engines, spreadsheets, machine learning
    neural networks, robots, self-driving cars, 3D printing, satellites, solar panels, wind turbines, electric cars, bicycles
    the Roman Empire, ancient Egypt, the Silk Road, the printing press, the Industrial Revolution, the Renaissance, the Vikings
    the French Revolution, the first moon landing, the invention of paper, medieval castles, the history of chess, lighthouses
    Paris, Tokyo, Kenya, Brazil, the Alps, the Amazon rainforest, New York, Iceland, the Nile, Venice, Australia, India
    public libraries, town markets, school uniforms, museums, city parks, train travel, weekend trips, camping, road trips
    time management, public speaking, job interviews, teamwork, meetings, remote work, learning a language, note taking
    healthy breakfasts, stretching, running, swimming, yoga, sleep, drinking water, stress, meditation, walking to work
    saving money, household budgets, taxes, small businesses, advertising, customer service, supply and demand, inflation
    fractions, prime numbers, triangles, probability, averages, percentages, the number pi, geometry, algebra, graphs
    poetry, short stories, detective novels, fairy tales, song lyrics, theatre, painting, photography, sculpture, architecture
    the violin, jazz, drums, choirs, movie scripts, comic books, board games, football, tennis, basketball, gardening, roses
    house plants, compost, bird watching, stargazing, fishing, knitting, woodworking, pottery, origami, cooking for friends
    friendship, honesty, patience, courage, curiosity, kindness, leadership, creativity, humour, gratitude, teaching, parenting
    recycling, climate change, clean water, forests, endangered animals, plastic waste, electric light, vaccines, the heart
    the human brain, bones, vitamins, the immune system, teeth, eyesight, first aid, allergies, the common cold, medicine
    maps, clocks, bridges, tunnels, airports, ships, elevators, refrigerators, microwave ovens, telephones, radio, the internet
    """.strip().splitlines()
    for subject in line.split(",")
)

# {a} and {b} are two subjects, {n} a small number.
TEMPLATES: tuple[str, ...] = (
    "Explain {a} in simple terms.",
    "What is the most important thing to know about {a}?",
    "Give me {n} interesting facts about {a}.",
    "Write a short paragraph about {a}.",
    "How would you explain {a} to a child?",
    "What are the advantages and disadvantages of {a}?",
    "Compare {a} and {b}.",
    "Write a short story that involves {a} and {b}.",
    "Write a poem about {a}.",
    "I am writing an essay about {a}. Can you give me an outline?",
    "List {n} questions a teacher could ask about {a}.",
    "Summarize the history of {a} in a few sentences.",
    "Give {n} tips for someone who wants to learn more about {a}.",
    "Write an email to a friend about {a}.",
    "What do most people get wrong about {a}?",
    "Create a dialogue between two people who talk about {a}.",
    "Why does {a} matter?",
    "Describe {a} to somebody who has never heard of it.",
    "Write a blog post introduction about {a}.",
    "What is the connection between {a} and {b}?",
    "Make a step by step plan to prepare a lesson about {a}.",
    "Please write a product description that mentions {a}.",
    "Tell me a joke about {a} and explain it.",
    "What will {a} look like in fifty years?",
    "Write {n} sentences about {a}, each beginning with a different word.",
    "How do I get started with {a}?",
    "What equipment or materials do I need for {a}?",
    "Write a Python function that has something to do with {a}.",
    "Give me a quiz with {n} questions and answers about {a}.",
    "Rewrite this sentence in a more formal style: I really like {a} because of {b}.",
    "Write a speech of one minute about {a}.",
    "What are common problems with {a} and how can they be solved?",
    "Who are some famous people connected with {a}?",
    "Describe a day in the life of someone who works with {a}.",
    "Write a review of a book about {a}.",
    "Define {a} and give an example.",
    "My friend thinks that {a} is boring. How can I change their mind?",
    "Write a letter to a newspaper about {a}.",
    "Name {n} things that {a} and {b} have in common.",
    "What should I know about {a} before I decide anything about {b}?",
)
HELD_OUT_TEMPLATES: tuple[str, ...] = (
    "Can you help me understand {a}?",
    "What makes {a} special?",
    "Write a dialogue in which a grandmother explains {a}.",
    "Give me a list of {n} ideas for a project about {a}.",
    "Which is more useful, {a} or {b}, and why?",
    "Write an introduction for a talk about {a}.",
    "Tell me something surprising about {a}.",
    "How has {a} changed the world?",
)
HELD_OUT_SHARE = 8  # one subject of so many is never trained on


def training_prompts(num_prompts: int, seed: int = 0) -> list[str]:
    """Distinct prompts to train on, the same for the same seed. A longer list begins with the shorter one."""
    return _draw(TEMPLATES, [s for i, s in enumerate(SUBJECTS) if i % HELD_OUT_SHARE], num_prompts, seed)


def held_out_prompts(num_prompts: int, seed: int = 0) -> list[str]:
    """Distinct prompts to measure on: other templates about other subjects."""
    return _draw(HELD_OUT_TEMPLATES, SUBJECTS[::HELD_OUT_SHARE], num_prompts, seed)


def _draw(templates: Sequence[str], subjects: Sequence[str], num_prompts: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    prompts: dict[str, None] = {}  # in order, each once
    for attempt in range(100 * num_prompts):
        a, b = rng.sample(subjects, 2)
        # each template in turn: their shares are equal in any prefix of the list
        prompts[templates[attempt % len(templates)].format(a=a, b=b, n=rng.randint(3, 7))] = None
        if len(prompts) == num_prompts:
            return list(prompts)
    raise ValueError(f"num_prompts={num_prompts}: the templates make no more than about {len(prompts)} different prompts.")
