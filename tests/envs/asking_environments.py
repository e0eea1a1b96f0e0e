"""An environment that asks a frozen policy, as its task says. Loaded by path, in environment workers."""

from __future__ import annotations

from tidemill import Chat, Score, Task, environment


@environment(tasks=[{"prompt": f"task {i}"} for i in range(20)], gold=lambda: "hello")
async def asking(task: Task, chat: Chat) -> Score:
    do = task.data.get("do", "judge")
    said = await chat.reply(task.prompt)
    if do == "judge":
        return Score(float(await chat.ask("judge", f"is {said} right?", max_tokens=4) == "yes"))
    if do == "twice":
        first = await chat.ask("judge", [{"role": "user", "content": said}])
        last = await chat.reply(first, last=True)
        return Score(0.5, {"first": float(len(first)), "same": float(first == await chat.ask("judge", last))})
    if do == "caught":
        try:
            await chat.ask("nobody", said)
        except ValueError as error:
            return Score(0.25, {"named": float("'nobody'" in str(error) and "'judge'" in str(error))})
    return Score(float(await chat.ask(do, said) == "yes"))
