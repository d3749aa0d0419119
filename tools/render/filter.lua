-- Quarto 方言的一个子集 → pandoc 原生元素：编号、标签、提示块、折叠代码；不认识的构件一律拒绝。
-- A subset of Quarto's dialect in pandoc's terms; whatever it does not know it refuses, with the cell.
-- 输入 BOOK_SETTINGS（JSON：number、depth、words）；输出写进元数据 book（JSON：labels、refs、sections、marks、errors）。
local S = pandoc.json.decode(os.getenv "BOOK_SETTINGS", false)
local W, cell = S.words, "?"
local out = {title = "", id = "", marks = {}, labels = {}, refs = {}, sections = {}, errors = {}}
local count, section = {eq = 0, fig = 0, tbl = 0}, {0, 0, 0, 0, 0}

local function set(words) local s = {}; for w in words:gmatch "%S+" do s[w] = true end; return s end
local function refuse(...) table.insert(out.errors, {cell = cell, message = string.format(...)}) end
local function plain(x) return (pandoc.write(pandoc.Pandoc(x), "plain", {wrap_text = "none"}):gsub("%s+$", "")) end

local CALLOUTS = set "note tip warning important caution"
local DIVS = set "cell-output cell-output-html cell-output-display code-fold exported"
local CODE = set "python bash text cuda cpp c json toml yaml ini makefile diff asm ptx cell-code cell-stream cell-stderr"
local HEADERS, PREFIX = set "unnumbered", set "eq fig tbl sec"

-- 第一遍：只检查。 First pass: checks only.
local check = {traverse = "topdown"}
function check.RawBlock(b)
  local mark = b.text:match "^<!%-%- cell (.-) %-%->$"
  if mark then cell = mark; table.insert(out.marks, mark)
  elseif not b.text:match "^<!%-%-" then refuse("正文里的原始 %s：%s", b.format, b.text:sub(1, 40)) end
end
function check.RawInline(x)
  if x.text ~= "<br>" and not x.text:match "^<!%-%-" then refuse("正文里的原始 %s：%s", x.format, x.text) end
end
function check.Header(h)
  for _, c in ipairs(h.classes) do if not HEADERS[c] then refuse("标题的未知类 .%s", c) end end
end
function check.Div(d)
  if d.classes:includes "cell-output-html" then return d, false end
  for _, c in ipairs(d.classes) do
    local kind = c:match "^callout%-(.+)$"
    if kind and not CALLOUTS[kind] then refuse("未知的提示块 callout-%s", kind)
    elseif not kind and not DIVS[c] then refuse("未知的 div 类 .%s", c) end
  end
  for k in pairs(d.attributes) do
    if k ~= "title" and k ~= "collapse" and k ~= "summary" then refuse("div 的未知属性 %s", k) end
  end
  if d.identifier ~= "" and not d.identifier:match "^fig%-" and not d.identifier:match "^tbl%-" then
    refuse("div 的标签 #%s 不是 fig- 或 tbl-", d.identifier)
  elseif #d.classes == 0 and d.identifier == "" then refuse("没有类也没有标签的 div") end
end
function check.Span(s)
  for _, c in ipairs(s.classes) do refuse("未知的 span 类 .%s", c) end
end
function check.CodeBlock(b)
  for _, c in ipairs(b.classes) do if not CODE[c] then refuse("代码块的未知语言 %s", c) end end
end
function check.Code(c)
  if c.text:match "^{%a+}" then refuse("可执行代码块 %s", c.text:match "^{%a+}") end
end
function check.Image(i)
  if plain(pandoc.Plain(i.caption)) == "" then refuse("图片没有替代文字：%s", i.src) end
end
function check.Figure(f)
  if f.identifier ~= "" and not f.identifier:match "^fig%-" then refuse("图的标签 #%s 不是 fig-", f.identifier) end
end
function check.Table(t)
  if t.identifier ~= "" and not t.identifier:match "^tbl%-" then refuse("表的标签 #%s 不是 tbl-", t.identifier) end
end
function check.Cite(c)
  for _, x in ipairs(c.citations) do
    if PREFIX[x.id:match "^(%a+)%-" or ""] then table.insert(out.refs, {id = x.id, cell = cell})
    else refuse("未知的引用 @%s", x.id) end
  end
end

-- 第二遍：编号与改写。 Second pass: number and rewrite.
local T = {traverse = "topdown"}
local function label(id, text, title) table.insert(out.labels, {id = id, cell = cell, text = text, title = title}) end
local function number(kind)
  count[kind] = count[kind] + 1
  return (S.number ~= "" and S.number .. "." or "") .. count[kind]
end
function T.RawBlock(b) cell = b.text:match "^<!%-%- cell (.-) %-%->$" or cell; return {} end
function T.Cite(c) return c, false end
function T.Str(s)
  for _, pat in ipairs {"{{<", "%$%$", "{#%a+%-[%w_-]+}?", "^```+", "^:::+", "@eq%-", "@fig%-", "@tbl%-", "@sec%-"} do
    local hit = s.text:match(pat)
    if hit then refuse("没有被解析的记号 %s（在 %s）", hit, s.text) end
  end
end
function T.Header(h)
  if h.level == 1 then
    if out.id ~= "" then refuse("第二个一级标题：%s", plain(pandoc.Plain(h.content))) end
    out.id, out.title = h.identifier, plain(pandoc.Plain(h.content))
    out.title_html = pandoc.write(pandoc.Pandoc(pandoc.Plain(h.content)), "html", {html_math_method = "mathjax"})
    label(h.identifier, W.chapter[S.kind]:gsub("{}", S.number) .. (S.kind == "front" and "「" .. out.title .. "」" or ""), out.title)
    return {}
  end
  local text = plain(pandoc.Plain(h.content))
  if S.number == "" or h.level > S.depth or h.classes:includes "unnumbered" then
    label(h.identifier, "「" .. text .. "」", text)
    return
  end
  section[h.level] = section[h.level] + 1
  for i = h.level + 1, #section do section[i] = 0 end
  local no = S.number
  for i = 2, h.level do no = no .. "." .. section[i] end
  label(h.identifier, (W.section:gsub("{}", no)), text)
  h.content:insert(1, pandoc.Space())
  h.content:insert(1, pandoc.Span(no, {class = "header-section-number"}))
  return h
end
local function equations(block)  -- Math, Space, Str "{#eq-x}"  →  Span#eq-x(Math \tag{2.1})
  local new = pandoc.Inlines {}
  for _, x in ipairs(block.content) do
    local id = x.t == "Str" and x.text:match "^{#(eq%-[%w_-]+)}"
    if id and #new > 0 and new[#new].t ~= "Math" then new:remove() end
    if id and #new > 0 and new[#new].t == "Math" and new[#new].mathtype == "DisplayMath" then
      local no = number "eq"
      label(id, W.eq:gsub("{}", no), "")
      local math = pandoc.Math("DisplayMath", new:remove().text:gsub("%s+$", "") .. " \\tag{" .. no .. "}")
      new:insert(pandoc.Span(math, {id = id, class = "equation"}))
      x = pandoc.Str(x.text:gsub("^{#[%w_-]+}", ""))
    end
    if not (x.t == "Str" and x.text == "") then new:insert(x) end
  end
  block.content = new
  return block
end
T.Para, T.Plain = equations, equations
local function float(id, content, caption)  -- 图与表：同一种浮动体。 Figures and tables are one kind of float.
  local kind = id:match "^(%a+)%-"
  if kind then
    local no = number(kind)
    label(id, W[kind]:gsub("{}", no), plain(pandoc.Plain(caption)))
    caption = pandoc.Inlines {pandoc.Span(W[kind]:gsub("{}", no), {class = "caption-number"}), pandoc.Space()} .. caption
  end
  return pandoc.Figure(content, {long = {pandoc.Plain(caption)}}, {id = id, class = "float " .. (kind or "fig")})
end
function T.Figure(f)
  if f.classes:includes "float" then return end
  return float(f.identifier, f.content, pandoc.utils.blocks_to_inlines(f.caption.long))
end
function T.Table(t)
  if t.classes:includes "framed" then return end
  local id, caption = t.identifier, pandoc.utils.blocks_to_inlines(t.caption.long)
  t.identifier, t.caption = "", {long = {}}
  t.classes:insert "framed"
  local frame = pandoc.Div(t, {class = "table-wrap"})
  if id == "" and #caption == 0 then return frame end
  local f = float(id, frame, caption)
  f.classes = {"float", "tbl"}
  return f
end
local function details(d, class, summary, open)
  local tag = pandoc.RawBlock("html", ('<details class="%s"%s><summary>'):format(class, open and " open" or ""))
  return {tag, pandoc.Plain(summary), pandoc.RawBlock("html", "</summary>"), pandoc.Div(d.content, {class = "details-body"}),
          pandoc.RawBlock("html", "</details>")}
end
local function callout(d, kind)
  local title, first = d.attributes.title and pandoc.Inlines(d.attributes.title), d.content[1]
  if not title and first and first.t == "Header" then title = first.content; d.content:remove(1) end
  title = title or pandoc.Inlines(W.callout[kind])
  d.content:walk {Header = function() refuse("提示块里只有第一行可以是标题") end}
  local collapse = d.attributes.collapse
  if collapse then return details(d, "callout callout-" .. kind, title, collapse == "false") end
  return pandoc.Div({pandoc.Div(pandoc.Plain(title), {class = "callout-title"}), pandoc.Div(d.content, {class = "details-body"})},
                    {class = "callout callout-" .. kind .. " done"})
end
function T.Div(d)
  if d.classes:includes "done" then return end
  if d.classes:includes "cell-output-html" then return d, false end
  if d.identifier:match "^fig%-" or d.identifier:match "^tbl%-" then
    local caption = d.content[#d.content]
    if not caption or caption.t ~= "Para" then refuse("#%s 没有标题", d.identifier); return end
    d.content:remove()
    return float(d.identifier, d.content, caption.content)
  end
  if d.classes:includes "code-fold" then return details(d, "code-fold", pandoc.Inlines(d.attributes.summary), false) end
  for _, c in ipairs(d.classes) do
    local kind = c:match "^callout%-(.+)$"
    if kind and CALLOUTS[kind] then return callout(d, kind) end
  end
end
function T.CodeBlock(b)
  if b.classes[1] == "cuda" then b.classes[1] = "cpp" end
  if b.classes[1] == "ptx" then b.classes[1] = "asm" end
  return b
end

-- 全角标点旁边的空格（引用前后必须写的那种）不留；短公式后面的标点不落到下一行的行首。
-- Drop spaces beside full-width punctuation, and keep it on the line of a short formula before it.
local AFTER, BEFORE = set "， 。 、 ； ： ） 」 』 》 ！ ？", set "， 。 、 ； ： （ 「 『 《 ！ ？"
local function tighten(inlines)
  for i = #inlines, 1, -1 do
    local a, b = inlines[i - 1], inlines[i + 1]
    if inlines[i].t == "Space" and (b and b.t == "Str" and AFTER[b.text:sub(1, 3)] or a and a.t == "Str" and BEFORE[a.text:sub(-3)]) then
      inlines:remove(i)
    end
  end
  for i = #inlines - 1, 1, -1 do
    local m, b = inlines[i], inlines[i + 1]
    if m.t == "Math" and m.mathtype == "InlineMath" and #m.text <= 30 and b.t == "Str" and AFTER[b.text:sub(1, 3)] then
      local rest = b.text:sub(4)
      inlines[i] = pandoc.Span({m, pandoc.Str(b.text:sub(1, 3))}, pandoc.Attr("", {"together"}))
      if rest == "" then inlines:remove(i + 1) else inlines[i + 1] = pandoc.Str(rest) end
    end
  end
  return inlines
end

-- 第三遍：收集检索文本。 Third pass: the text for the search index.
local function finish(doc)
  local skip = {Cite = function() return {} end, Note = function() return {} end,
                Math = function(m) if m.mathtype == "DisplayMath" then return {} end end,
                Span = function(s) if s.classes:includes "header-section-number" then return {} end end}
  local here = {id = out.id, title = out.title, blocks = pandoc.Blocks {}}
  local function flush() table.insert(out.sections, {here.id, here.title, plain(here.blocks:walk(skip))}) end
  for _, b in ipairs(doc.blocks) do
    if b.t == "Header" then
      flush()
      here = {id = b.identifier, title = plain(pandoc.Blocks {pandoc.Plain(b.content)}:walk(skip)), blocks = pandoc.Blocks {}}
    else here.blocks:insert(b) end
  end
  flush()
  if out.id == "" then refuse("没有一级标题") end
  doc.meta = {book = pandoc.MetaString(pandoc.json.encode(out))}
  return doc
end
return {check, T, {Inlines = tighten}, {Pandoc = finish}}
