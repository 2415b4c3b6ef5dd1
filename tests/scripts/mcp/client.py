"""Calls tools of `memtrace mcp` with the Python SDK, which is another implementation of the protocol.

usage: client.py CALLS MEMTRACE ARGUMENT...

CALLS is a JSON list of [tool, arguments]. Prints a JSON object: the server's name, its tools, and for each
call whether it is an error, and its text.
"""

import asyncio
import json
import sys

from mcp import ClientSession, StdioServerParameters, stdio_client


async def main(calls, command, arguments):
    answers = []
    server = StdioServerParameters(command=command, args=arguments)
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        started = await session.initialize()
        tools = (await session.list_tools()).tools
        for name, values in calls:
            result = await session.call_tool(name, values)
            answers.append({"error": bool(result.is_error), "text": result.content[0].text})
    tools = {tool.name: tool.input_schema for tool in tools}
    print(json.dumps({"server": started.server_info.name, "tools": tools, "answers": answers}))


asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]))
