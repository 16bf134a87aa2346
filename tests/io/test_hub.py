"""Pushing to the Hugging Face hub: its own client against a small server that holds repositories in memory."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from huggingface_hub import HfApi

from sprl.config import SettingsError
from sprl.io import hub


class Hub(ThreadingHTTPServer):
  """The calls of the hub's API that a push makes. `repos` maps a name to {private, files}."""

  def __init__(self):
    super().__init__(('localhost', 0), Handler)
    self.repos: dict[str, dict] = {}
    self.tokens: list[str | None] = []
    self.commits: list[dict] = []
    self.cards: list[str] = []


class Handler(BaseHTTPRequestHandler):
  server: Hub

  def log_message(self, *_):
    pass

  def answer(self, value, status=200):
    data = json.dumps(value).encode()
    self.send_response(status)
    self.send_header('Content-Type', 'application/json')
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def do_GET(self):
    _, _, owner, name, *rest = [*self.path.partition('?')[0].strip('/').split('/', 4), '']
    name = f'{owner}/{name}'
    repo = self.server.repos.get(name)
    if repo is None:
      return self.answer({'error': 'Repository not found'}, 404)
    files = [{'type': 'file', 'path': path, 'size': len(data), 'oid': '0'} for path, data in repo['files'].items()]
    if rest[0].startswith('tree'):
      return self.answer(files)
    siblings = [{'rfilename': path} for path in repo['files']]
    tags = yaml.safe_load(repo['files'].get('README.md', b'').decode().partition('---\n')[2].partition('---\n')[0] or '{}')
    repo = {'private': repo['private'], 'siblings': siblings, 'sha': '0' * 40, 'tags': tags.get('tags', [])}
    return self.answer({'id': name, **repo})

  def do_POST(self):
    body = self.rfile.read(int(self.headers['Content-Length']))
    self.server.tokens.append(self.headers.get('Authorization'))
    if self.server.tokens[-1] is None:
      return self.answer({'error': 'Invalid username or password.'}, 401)
    if self.path == '/api/repos/create':
      asked = json.loads(body)
      name = f'{asked["organization"]}/{asked["name"]}' if asked.get('organization') else asked['name']
      if name in self.server.repos:
        return self.answer({'error': 'You already created this model repo', 'url': f'/{name}'}, 409)
      private = asked.get('private') or asked.get('visibility') == 'private'
      self.server.repos[name] = {'private': bool(private), 'files': {}}
      return self.answer({'url': f'http://localhost/{name}'})
    if self.path == '/api/validate-yaml':  # the front matter of README.md
      self.server.cards.append(json.loads(body)['content'])
      return self.answer({'errors': [], 'warnings': []})
    _, _, owner, name, action, *_ = self.path.strip('/').split('/')
    if action == 'preupload':
      files = [{**file, 'uploadMode': 'regular', 'shouldIgnore': False} for file in json.loads(body)['files']]
      return self.answer({'files': files})
    if action == 'commit':
      lines = [json.loads(line) for line in body.decode().splitlines()]
      held = self.server.repos[f'{owner}/{name}']['files']
      for line in lines:
        if line['key'] == 'file':
          held[line['value']['path']] = base64.b64decode(line['value']['content'])
        if line['key'] == 'deletedFile':
          del held[line['value']['path']]
      self.server.commits.append(next(line['value'] for line in lines if line['key'] == 'header'))
      return self.answer({'success': True, 'commitOid': 'a' * 40, 'commitUrl': f'http://localhost/{owner}/{name}/commit/a'})
    return self.answer({'error': f'unexpected {self.path}'}, 500)


@pytest.fixture
def server():
  with Hub() as server:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()


def client(server, token: str | bool = 'hf_secret') -> HfApi:
  return HfApi(endpoint=f'http://localhost:{server.server_address[1]}', token=token)


def test_a_folder_is_pushed_to_a_new_private_repository(server, tmp_path):
  (tmp_path / 'README.md').write_text('---\nlicense: mit\n---\n')
  (tmp_path / 'model.safetensors').write_bytes(b'weights')
  hub.create('me/model', private=True, client=client(server))
  server.repos['me/model']['files'] |= {'model-00001-of-00002.safetensors': b'', 'notes.txt': b'kept'}  # of an earlier push
  url = hub.push('me/model', tmp_path, 'step 3', client=client(server))
  assert url == 'http://localhost/me/model/commit/a'
  repo = server.repos['me/model']
  assert repo['private']
  assert repo['files'] == {
    'README.md': b'---\nlicense: mit\n---\n', 'model.safetensors': b'weights', 'notes.txt': b'kept'
  }  # fmt: skip
  assert [commit['summary'] for commit in server.commits] == ['step 3']
  assert set(server.tokens) == {'Bearer hf_secret'}


def test_a_push_deletes_what_an_export_of_another_kind_left(server, tmp_path):
  (tmp_path / 'model.safetensors').write_bytes(b'weights')
  hub.create('me/model', private=False, client=client(server))
  kept = {'.gitattributes': b'', 'notes.txt': b'', 'other.safetensors': b''}
  left = {'adapter_config.json': b'', 'adapter_model.safetensors': b'', 'chat_template.jinja': b''}
  server.repos['me/model']['files'] |= kept | left
  hub.push('me/model', tmp_path, 'step 3', client=client(server))
  assert server.repos['me/model']['files'] == kept | {'model.safetensors': b'weights'}


def test_a_model_that_sprl_has_not_pushed_is_not_replaced(server):
  hub.create('me/model', private=False, client=client(server))
  files = server.repos['me/model']['files']
  files['README.md'] = b'---\nlicense: mit\n---\n'
  hub.create('me/model', private=False, client=client(server))  # a card, but no model yet
  files['model-00001-of-00002.safetensors'] = b'weights'
  with pytest.raises(SettingsError, match=r'--push=me/model: holds model-00001-of-00002.safetensors, and .* no tag `sprl`'):
    hub.create('me/model', private=False, client=client(server))
  files['README.md'] = b'---\nlicense: mit\ntags: ["sprl", "lora"]\n---\n'
  hub.create('me/model', private=False, client=client(server))


def test_an_existing_repository_keeps_its_visibility(server):
  hub.create('me/open', private=False, client=client(server))
  hub.create('me/open', private=False, client=client(server))
  with pytest.raises(SettingsError, match='--push=me/open: exists and is public; expected no --private'):
    hub.create('me/open', private=True, client=client(server))


def test_a_refusal_of_the_hub_is_one_line_with_the_way_out(server):
  with pytest.raises(SettingsError, match=r'--push=me/model: the Hugging Face hub refused it .*401.*HF_TOKEN'):
    hub.create('me/model', private=False, client=client(server, token=False))


@pytest.mark.parametrize('name', ['model', 'a/b/c', 'https://huggingface.co/a/b', ''])
def test_a_repository_is_owner_and_name(name):
  with pytest.raises(SettingsError, match=f'--push={name}: expected OWNER/NAME'):
    hub.check_name(name)
