// A system around the accelerator without a processor: a memory that holds a ring of descriptors, and a state machine
// that writes a few registers and waits for the interrupt. Synthesizable; see docs/integration.md.

/* verilator lint_off PINCONNECTEMPTY */  // what this system does not use is left open
/* verilator lint_off UNUSEDSIGNAL */  // bits of addresses beyond the memory, and of words beyond one field

module matvec #(
    parameter IMAGE = "image.hex",         // contents of the memory, a word of 128 bits a line
    parameter WORDS = 4096,                // words of the memory, a power of two
    parameter X_LANES = 4,                 // activations in a transfer of s_axis_x, see the register PORTS
    parameter [31:0] DESCRIPTORS = 2       // descriptors in the ring, from address 0 on
) (
    input  wire clk,
    input  wire rst,
    output reg  done,                      // the ring has been run to its end
    output reg  failed,                    // the accelerator stopped with an error
    // A view of the memory, a cycle later.
    input  wire [$clog2(WORDS)-1:0] view_address,
    output reg  [127:0]             view_data
);
  localparam ADDRESS_BITS = $clog2(WORDS);

  // Registers, from kvant_top_registers.h; offsets in bytes.
  localparam [11:0] IRQ_ENABLE = 12'h028, IRQ_STATUS = 12'h02C, RING_BASE_LO = 12'h040, RING_COUNT = 12'h048;
  localparam [11:0] RING_TAIL = 12'h050, CONTROL = 12'h020;
  localparam [31:0] START = 32'h1, IDLE_EVENT = 32'h2, ERROR_EVENT = 32'h4;

  // ---- what joins accelerator, memory and state machine

  wire [3:0] arid, awid;
  wire [31:0] araddr, awaddr;
  wire [7:0] arlen, awlen;
  wire arvalid, awvalid, wvalid, wlast, bready, rready;
  wire [127:0] wdata;
  wire [15:0] wstrb;
  reg arready, awready, rvalid, rlast, bvalid;
  reg [3:0] rid, bid;
  reg [127:0] rdata;
  wire wready;

  reg [11:0] lite_address;
  reg [31:0] lite_data;
  reg lite_awvalid, lite_wvalid, lite_arvalid;
  wire lite_awready, lite_wready, lite_bvalid, lite_arready, lite_rvalid;
  wire [31:0] lite_rdata;
  wire irq;

  kvant_top accelerator (
      .clk(clk),
      .rst(rst),
      .irq(irq),
      .s_axil_awaddr(lite_address),
      .s_axil_awvalid(lite_awvalid),
      .s_axil_awready(lite_awready),
      .s_axil_wdata(lite_data),
      .s_axil_wstrb(4'hF),
      .s_axil_wvalid(lite_wvalid),
      .s_axil_wready(lite_wready),
      .s_axil_bresp(),
      .s_axil_bvalid(lite_bvalid),
      .s_axil_bready(1'b1),
      .s_axil_araddr(lite_address),
      .s_axil_arvalid(lite_arvalid),
      .s_axil_arready(lite_arready),
      .s_axil_rdata(lite_rdata),
      .s_axil_rresp(),
      .s_axil_rvalid(lite_rvalid),
      .s_axil_rready(1'b1),
      .m_axi_arid(arid),
      .m_axi_araddr(araddr),
      .m_axi_arlen(arlen),
      .m_axi_arsize(),
      .m_axi_arburst(),
      .m_axi_arcache(),
      .m_axi_arprot(),
      .m_axi_arvalid(arvalid),
      .m_axi_arready(arready),
      .m_axi_rid(rid),
      .m_axi_rdata(rdata),
      .m_axi_rresp(2'b00),
      .m_axi_rlast(rlast),
      .m_axi_rvalid(rvalid),
      .m_axi_rready(rready),
      .m_axi_awid(awid),
      .m_axi_awaddr(awaddr),
      .m_axi_awlen(awlen),
      .m_axi_awsize(),
      .m_axi_awburst(),
      .m_axi_awcache(),
      .m_axi_awprot(),
      .m_axi_awvalid(awvalid),
      .m_axi_awready(awready),
      .m_axi_wdata(wdata),
      .m_axi_wstrb(wstrb),
      .m_axi_wlast(wlast),
      .m_axi_wvalid(wvalid),
      .m_axi_wready(wready),
      .m_axi_bid(bid),
      .m_axi_bresp(2'b00),
      .m_axi_bvalid(bvalid),
      .m_axi_bready(bready),
      // The streams are for jobs with the flags X_STREAM and Y_STREAM, of which there are none here.
      .s_axis_x_tvalid(1'b0),
      .s_axis_x_tready(),
      .s_axis_x_tdata({X_LANES{16'd0}}),
      .m_axis_y_tvalid(),
      .m_axis_y_tready(1'b1),
      .m_axis_y_tdata(),
      .m_axis_y_tkeep(),
      .m_axis_y_tlast()
  );

  // ---- the memory: one burst of reads and one of writes at a time

  reg [127:0] memory[0:WORDS-1];
  initial $readmemh(IMAGE, memory);

  wire [ADDRESS_BITS-1:0] read_first = araddr[ADDRESS_BITS+3:4], write_first = awaddr[ADDRESS_BITS+3:4];
  reg [ADDRESS_BITS-1:0] read_address, write_address;
  reg [7:0] read_left;
  reg reading, writing;

  always @(posedge clk) begin
    if (rst) begin
      reading <= 1'b0;
      arready <= 1'b0;
      rvalid  <= 1'b0;
    end else begin
      arready <= 1'b0;
      if (!reading && !rvalid && arvalid && !arready) begin
        arready <= 1'b1;
        reading <= 1'b1;
        rid <= arid;
        read_address <= read_first;
        read_left <= arlen;
      end
      if (!rvalid || rready) begin
        rvalid <= reading;
        rdata  <= memory[read_address];
        rlast  <= read_left == 8'd0;
        if (reading) begin
          read_address <= read_address + 1'b1;
          read_left <= read_left - 1'b1;
          reading <= read_left != 8'd0;
        end
      end
    end
    view_data <= memory[view_address];
  end

  assign wready = writing && !bvalid;
  integer lane;

  always @(posedge clk) begin
    if (rst) begin
      writing <= 1'b0;
      awready <= 1'b0;
      bvalid  <= 1'b0;
    end else begin
      awready <= 1'b0;
      if (!writing && !bvalid && awvalid && !awready) begin
        awready <= 1'b1;
        writing <= 1'b1;
        bid <= awid;
        write_address <= write_first;
      end
      if (wvalid && wready) begin
        write_address <= write_address + 1'b1;
        writing <= !wlast;
        bvalid <= wlast;
      end
      if (bvalid && bready) bvalid <= 1'b0;
    end
    for (lane = 0; lane < 16; lane = lane + 1)
      if (wvalid && wready && wstrb[lane]) memory[write_address][8*lane+:8] <= wdata[8*lane+:8];
  end

  // ---- the host: writes registers, waits for `irq`, reads which event it was

  reg [2:0] step;
  reg [1:0] state;
  localparam [1:0] WRITE = 2'd0, ANSWER = 2'd1, WAIT = 2'd2, READ = 2'd3;

  always @* begin
    case (step)
      3'd0: {lite_address, lite_data} = {IRQ_ENABLE, IDLE_EVENT | ERROR_EVENT};
      3'd1: {lite_address, lite_data} = {RING_BASE_LO, 32'd0};
      3'd2: {lite_address, lite_data} = {RING_COUNT, DESCRIPTORS + 32'd1};
      3'd3: {lite_address, lite_data} = {RING_TAIL, DESCRIPTORS};
      3'd4: {lite_address, lite_data} = {CONTROL, START};
      default: {lite_address, lite_data} = {IRQ_STATUS, 32'd0};
    endcase
  end

  always @(posedge clk) begin
    if (rst) begin
      step <= 3'd0;
      state <= WRITE;
      lite_awvalid <= 1'b1;
      lite_wvalid <= 1'b1;
      lite_arvalid <= 1'b0;
      done <= 1'b0;
      failed <= 1'b0;
    end else begin
      // Address and data of a write are taken one by one, in any order.
      if (lite_awready) lite_awvalid <= 1'b0;
      if (lite_wready) lite_wvalid <= 1'b0;
      if (lite_arready) lite_arvalid <= 1'b0;
      case (state)
        WRITE: if ((!lite_awvalid || lite_awready) && (!lite_wvalid || lite_wready)) state <= ANSWER;
        ANSWER:
        if (lite_bvalid) begin
          step <= step + 1'b1;
          state <= step == 3'd4 ? WAIT : WRITE;
          lite_awvalid <= step != 3'd4;
          lite_wvalid <= step != 3'd4;
        end
        WAIT:
        if (irq && !done) begin
          lite_arvalid <= 1'b1;
          state <= READ;
        end
        default:
        if (lite_rvalid) begin
          done   <= lite_rdata[1] && !lite_rdata[2];
          failed <= lite_rdata[2];
          state  <= WAIT;
        end
      endcase
    end
  end
endmodule
